"""A trained agent without this library: its form's file, and any way to run the model.

    agentic-prompting merge runs/real --output-dir agent
    python agent_without_library.py agent "Who is the mayor of Fenmere?"                 # plain transformers
    python agent_without_library.py agent "Who is the mayor of Fenmere?" \\
        --base-url http://localhost:8000/v1 --model agent                                  # vLLM, llama.cpp, Ollama

Nothing of agentic-prompting is imported. `agentic_prompting.json`, which a trainer writes beside
the weights, says how the agent is asked and what its turns mean. Whatever the agent asks is shown
here, and you type the reply: put your search or your large model into `reply_to`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Complete = Callable[[list[dict[str, str]]], str]


def reply_to(request: str) -> str:
    """Answer what the agent asks: you do. Your search, your tool or your large model goes here."""
    print(f"agent asks     {request}")
    return input("your reply     ")


def stop_texts(form: dict[str, Any]) -> list[str]:
    """The texts after which a turn is over."""
    grammar = form["grammar"]
    if grammar["kind"] == "TagGrammar":
        return [f"</{grammar['act']}>", f"</{grammar['answer']}>"]
    if grammar["kind"] == "QuestionGrammar":
        return ["?"]
    return []


def cut_turn(text: str, form: dict[str, Any]) -> str:
    """A turn up to its first stop text.

    Servers drop the stop texts that they are given, so they are not given any.
    """
    ends = [text.find(stop) + len(stop) for stop in stop_texts(form) if stop in text]
    return text[: min(ends)] if ends else text


def read_turn(turn: str, form: dict[str, Any]) -> tuple[str, str]:
    """The kind of a turn (`ask`, `answer` or `malformed`), and its request or answer."""
    grammar = form["grammar"]
    if grammar["kind"] == "TagGrammar":
        for role, tag in (("ask", grammar["act"]), ("answer", grammar["answer"])):
            match = re.search(f"<{tag}>(.*?)</{tag}>", turn, re.DOTALL)
            if match:
                return role, match[1].strip()
        return "malformed", turn
    # Without tags a question mark asks, and any other text is the answer.
    asks = grammar["kind"] == "QuestionGrammar" and turn.rstrip().endswith("?")
    return ("ask" if asks else "answer"), turn.strip()


def frame_reply(reply: str, form: dict[str, Any]) -> str:
    """A reply as the agent was trained to read it."""
    grammar = form["grammar"]
    if grammar["kind"] == "TagGrammar":
        return f"<{grammar['observation']}>\n{reply}\n</{grammar['observation']}>"
    before, after = grammar.get("frame", ("", ""))
    return f"{before}{reply}{after}"


def talk(question: str, form: dict[str, Any], complete: Complete) -> str | None:
    """Let the agent ask until it answers; its answer, or `None` if it has given none."""
    messages = []
    if form["system_prompt"]:
        messages.append({"role": "system", "content": form["system_prompt"]})
    prompt = form["prompt_template"].replace("{question}", question)
    messages.append({"role": "user", "content": prompt})
    for turn_number in range(1, form["limits"]["max_turns"] + 1):
        turn = cut_turn(complete(messages), form)
        action, text = read_turn(turn, form)
        if action == "answer":
            return text
        if action == "malformed" or turn_number == form["limits"]["max_turns"]:
            return None
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "user", "content": frame_reply(reply_to(text), form)})
    return None


def with_transformers(folder: str, form: dict[str, Any], greedy: bool) -> Complete:
    """The agent's model in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # As in training: temperature and the like.
    options: dict[str, Any] = {"do_sample": False} if greedy else sampling_options(form)

    def complete(messages: list[dict[str, str]]) -> str:
        inputs = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **form["chat_template_kwargs"],
        )
        with torch.no_grad():
            ids = model.generate(
                **inputs,
                max_new_tokens=form["limits"]["max_turn_tokens"],
                **options,
            )
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return complete


def sampling_options(form: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of training, as `generate` names them."""
    sampling = form["sampling"]
    options = {"do_sample": True, "top_k": 0, "temperature": sampling.get("temperature", 1.0)}
    return options | {name: sampling[name] for name in ("top_p", "top_k") if name in sampling}


def with_server(base_url: str, name: str, form: dict[str, Any], greedy: bool) -> Complete:
    """The agent's model behind an address that speaks OpenAI's chat completions."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    temperature = 0.0 if greedy else form["sampling"].get("temperature", 1.0)

    def complete(messages: list[dict[str, str]]) -> str:
        reply = client.chat.completions.create(
            model=name,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=form["limits"]["max_turn_tokens"],
            temperature=temperature,
        )
        return reply.choices[0].message.content or ""

    return complete


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="the merged agent, or the folder with its form's file")
    parser.add_argument("question")
    parser.add_argument("--base-url", help="an address, in the place of transformers")
    parser.add_argument("--model", default="agent", help="the model's name at the address")
    parser.add_argument("--greedy", action="store_true", help="the likeliest token each time")
    arguments = parser.parse_args()
    form = json.loads((Path(arguments.folder) / "agentic_prompting.json").read_text("utf-8"))
    if arguments.base_url:
        complete = with_server(arguments.base_url, arguments.model, form, arguments.greedy)
    else:
        complete = with_transformers(arguments.folder, form, arguments.greedy)
    print(f"agent answers  {talk(arguments.question, form, complete)}")


if __name__ == "__main__":
    main()
