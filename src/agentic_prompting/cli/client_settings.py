"""How a model is called, as options such as `--reference-client rate=60,key=MY_KEY` say."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..llm import OpenAIChat


def client_help(model: str) -> str:
    """The help of an option that [`ClientSettings`] reads."""
    return f"How {model} is called: concurrency=8,rate=60,price=0.15/0.6,key=VARIABLE."


@dataclass
class ClientSettings:
    """How a model is called: an option such as `concurrency=8,rate=60,price=0.15/0.6,key=MY_KEY`.

    Args:
        option (`str`): The name of the option, for errors.
        concurrency (`int`, *optional*): Calls in flight.
        rate (`float`, *optional*): Requests per minute.
        price (`tuple[float, float]`, *optional*): US dollars per million tokens read and written.
        key_variable (`str`, *optional*): The environment variable that holds the key.
    """

    option: str
    concurrency: int | None = None
    rate: float | None = None
    price: tuple[float, float] | None = None
    key_variable: str | None = None

    @classmethod
    def read(cls, text: str | None, option: str) -> ClientSettings:
        """The settings of an option's text.

        Raises:
            `ValueError`: A setting does not exist, or its value is wrong. The message never shows a
            value of `key`.
        """
        settings = cls(option)
        for pair in (text or "").split(","):
            name, _, value = pair.strip().partition("=")
            if name == "key":
                settings.key_variable = value
            elif name in _EXPECTED_VALUES:
                settings._set_number(name, value)
            elif name:
                raise ValueError(
                    f"--{option} has no setting {name!r}: they are concurrency, rate, price and key"
                )
        return settings

    def _set_number(self, name: str, value: str) -> None:
        """Set one of the settings of `_EXPECTED_VALUES` from its text."""
        try:
            if name == "concurrency":
                self.concurrency = int(value)
            elif name == "rate":
                self.rate = float(value)
            else:
                input_price, _, output_price = value.partition("/")
                self.price = (float(input_price), float(output_price))
        except ValueError:
            raise ValueError(
                f"--{self.option} {name}={value}: expected {_EXPECTED_VALUES[name]}"
            ) from None

    def make_client(self, model: str | None, base_url: str | None, **arguments: Any) -> OpenAIChat:
        """A client with these settings and other arguments of [`OpenAIChat`].

        Raises:
            `ValueError`: The key cannot be read, or a setting is out of range.
        """
        from ..llm import OpenAIChat

        if self.key_variable is not None:
            arguments["api_key"] = read_key(self.key_variable, f"--{self.option} key=")
        if self.concurrency is not None:
            arguments["max_concurrency"] = self.concurrency
        client = OpenAIChat(
            str(model),
            base_url=base_url,
            requests_per_minute=self.rate,
            price=self.price,
            **arguments,
        )
        # Errors name the variable that was given, whatever its name looks like.
        if self.key_variable is not None:
            client.key_variable = self.key_variable
        return client


_EXPECTED_VALUES = {
    "concurrency": "a whole number, such as concurrency=8",
    "rate": "requests per minute, such as rate=60",
    "price": "US dollars per million tokens read and written, such as price=0.15/0.6",
}


def read_key(variable: str, setting: str) -> str:
    """Return the key in an environment variable.

    Args:
        variable (`str`): The name of the variable.
        setting (`str`): The setting that has this name, for errors.

    Raises:
        `ValueError`: It is no name, or there is no such variable. A text that is no name is not
            shown: it may be a key itself.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):
        raise ValueError(
            f"{setting} takes the name of an environment variable that has the key, not the key"
        )
    if not os.environ.get(variable):
        raise ValueError(f"{setting} {variable}: the environment has no variable {variable}")
    return os.environ[variable]
