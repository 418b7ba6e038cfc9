"""The parser of commands whose options are the fields of dataclasses, as in the scripts of TRL and
transformers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from transformers import HfArgumentParser

_TRUTH_VALUES = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")


class OptionParser(HfArgumentParser):
    """transformers' parser of dataclasses.

    A mistake is a `ValueError` of one line instead of an exit.

    Args:
        command (`str`): The command's name.
        settings (`Sequence[type]`): The dataclasses whose fields are the options.
        description (`str`, *optional*): What the command does, for its help.
        words (`str`, *optional*): The words that are not options, such as `RUN QUESTION`, for its
            help.
    """

    def __init__(
        self,
        command: str,
        settings: Sequence[type],
        description: str | None = None,
        words: str = "",
    ):
        super().__init__(
            settings,
            prog=f"agentic-prompting {command}",
            usage=" ".join(filter(None, ["agentic-prompting", command, words, "[OPTIONS]"])),
            description=description,
            allow_abbrev=False,
        )
        self._config_words: list[str] = []

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """One object of each dataclass. Raises `ValueError` for a wrong name or value."""
        *settings, words = self.parse_with_words(arguments)
        if words:
            raise ValueError(
                f"{words[0]!r} belongs to no option; each option is written as --name value"
            )
        return tuple(settings)

    def parse_with_words(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """One object of each dataclass, and the list of words that belong to no option.

        Raises:
            `ValueError`: An option does not exist, or its value has the wrong type.
        """
        # Wrong names are reported before wrong values.
        self._check_names(arguments)
        self._check_repeated_lists(arguments)
        # Options of the YAML file come first, so that those of the command line win.
        return self.parse_args_into_dataclasses(
            [*self._config_words, *self._with_values_of_switches(arguments)],
            return_remaining_strings=True,
            look_for_args_file=False,
        )

    def set_config(self, values: Mapping[str, Any], file: str) -> None:
        """Take the options of a YAML file as TRL's parser does, with the checks of the command
        line, which takes precedence.

        Args:
            values (`Mapping[str, Any]`): The content of the file. `env` holds environment variables
                to set.
            file (`str`): Its name, for errors.

        Raises:
            `ValueError`: An option does not exist, or is given a mapping or a list and takes
            neither.
        """
        for name, value in values.items():
            if name == "env":
                os.environ.update({variable: str(text) for variable, text in dict(value).items()})
            elif not self.is_option(name):
                raise ValueError(f"{file}: {self._describe_unknown(str(name), dashes='')}")
            else:
                self._take_value(name, value, file)

    def _check_repeated_lists(self, arguments: Sequence[str]) -> None:
        """Raise `ValueError` for an option with several values that is typed twice: only the last
        one would count.
        """
        typed_options = [word.partition("=")[0] for word in arguments]
        for option in dict.fromkeys(typed_options):
            action = self._option_string_actions.get(option)
            takes_list = action is not None and action.nargs == "+"
            # Some lists are extended each time; of the others only the last one counts.
            is_extended = isinstance(action, argparse._ExtendAction)
            if takes_list and not is_extended and typed_options.count(option) > 1:
                raise ValueError(
                    f"{option} is given {typed_options.count(option)} times: write all its values "
                    f"after one {option}, as in {option} A B"
                )

    def _take_value(self, name: str, value: Any, file: str) -> None:
        """Keep the value of an option from a YAML file: as words, or else as the default."""
        option = f"--{name}"
        action = self._option_string_actions[option]
        takes_list = action.nargs == "+"
        # Scalars and lists become words that argparse checks.
        if takes_list and isinstance(value, list) and value:
            self._config_words += [option, *(str(item) for item in value)]
            return
        if value is not None and not isinstance(value, Mapping | list):
            # After `=` a value may begin with a dash.
            self._config_words.append(f"{option}={value}")
            return
        # The others have no form as words: `null`, an empty list, and mappings and lists of lists,
        # which transformers reads from JSON, so that they are texts to argparse.
        is_empty = value is None or (takes_list and isinstance(value, list))
        if not is_empty and (action.type is not str or takes_list):
            raise ValueError(f"{file}: {name} is not an option for {str(value)[:60]}")
        self.set_defaults(**{name: value})

    def hide_options(self, names: Collection[str]) -> None:
        """Leave options out of the help."""
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def _check_names(self, arguments: Sequence[str]) -> None:
        """Raise `ValueError` for an option that does not exist, with the nearest one."""
        for word in arguments:
            # An option and its value may be one word, `--name=value`.
            name = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and name and not self.is_option(name):
                raise ValueError(self._describe_unknown(name, dashes="--"))

    def is_option(self, name: str) -> bool:
        """Whether there is an option of this name, which is without dashes as in a YAML file."""
        return f"--{name}" in self._option_string_actions

    def nearest_option(self, name: str) -> str | None:
        """The name of the option that is most like a misspelt one."""
        names = [option.removeprefix("--") for option in self._option_string_actions]
        return next(iter(get_close_matches(name, names, n=1)), None)

    def _describe_unknown(self, name: str, dashes: str) -> str:
        nearest = self.nearest_option(name)
        suggestion = f"; did you mean {dashes}{nearest}?" if nearest else ""
        return f"{dashes}{name} is not an option of {self.prog}{suggestion}"

    def _with_values_of_switches(self, arguments: Sequence[str]) -> list[str]:
        """Write `--json` as `--json=true`: argparse would read the next word, such as a folder, as
        its value.
        """
        words = []
        for position, word in enumerate(arguments):
            action = self._option_string_actions.get(word)
            # A switch is an option whose value may be left out.
            is_switch = action is not None and action.nargs == "?"
            next_word = arguments[position + 1] if position + 1 < len(arguments) else ""
            if is_switch and next_word.lower() not in _TRUTH_VALUES:
                word = f"{word}=true"
            words.append(word)
        return words
