"""Is each large LLM there, under this name, with this key, and is its price known?"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .finding import Finding, Role, Setup

if TYPE_CHECKING:
    from ...llm import LLMError, OpenAIChat

_SECONDS = 15.0


def keys(setup: Setup) -> Iterator[Finding]:
    """Whether there is a key where one is needed. It is never shown."""
    for role in setup.roles:
        with _client(role) as chat:
            endpoint = chat.endpoint
        if endpoint.find_key():
            yield Finding("ok", f"{role.name}: key found in {endpoint.key_variable}")
        elif endpoint.needs_key:
            yield Finding(
                "problem",
                f"{role.name}: no key for {role.model}, and no address of an endpoint that does without",
                f"export {endpoint.key_variable}=YOUR_KEY, or --{role.name}-base-url http://HOST:PORT/v1",
            )
        else:
            yield Finding("ok", f"{role.name}: no key; an endpoint given by its address may do without")


def answers(setup: Setup) -> Iterator[Finding]:
    """Asks each model for one word, as training does before it starts."""
    from ...llm import LLMError

    for role in setup.roles:
        started = time.perf_counter()
        with _client(role) as chat:
            if chat.endpoint.needs_key and not chat.endpoint.find_key():
                continue  # said above
            try:
                chat.check()
            except LLMError as error:
                yield Finding("problem", f"{role.name}: {error}", _fix(role, chat, error))
            else:
                yield Finding(
                    "ok", f"{role.name}: {chat.endpoint.where} answers ({time.perf_counter() - started:.1f} s)"
                )


def prices(setup: Setup) -> Iterator[Finding]:
    """Whether dollars can be counted."""
    budget = setup.value("budget_usd")
    for role in setup.roles:
        with _client(role) as chat:
            price = chat.endpoint.price
        if price is not None:
            says = f"{role.name}: {role.model} costs ${price[0]:g} in, ${price[1]:g} out per million tokens (our table)"
            yield Finding("ok", says)
        elif budget is not None and setup.value("budget_tokens") is None:
            where = (
                f"in {setup.config}: budget_tokens: 2000000 instead of budget_usd"
                if setup.config
                else ("leave out --budget-usd; training and the Python API take budget_tokens")
            )
            says = f"{role.name}: budget_usd can never be reached, the price of {role.model!r} is not known"
            yield Finding("problem", says, where)
        elif role.base_url is None:
            says = f"{role.name}: the price of {role.model!r} is not known: costs are shown as $0"
            yield Finding("warning", says, "--budget_tokens 2000000 limits what training spends all the same")
        else:
            yield Finding("ok", f"{role.name}: {role.model!r} has no known price: costs are shown as $0")


def _client(role: Role) -> OpenAIChat:
    from ...llm import OpenAIChat

    return OpenAIChat(role.model, base_url=role.base_url, timeout=_SECONDS, max_retries=0, patience=1)


def _fix(role: Role, chat: OpenAIChat, error: LLMError) -> str:
    """What to type for what a first call met."""
    url = chat.endpoint.base_url.rstrip("/")
    if error.status in (401, 403):
        return f"export {chat.endpoint.key_variable}=YOUR_KEY with a key that this endpoint knows"
    known = models_at(url, chat)
    if known and role.model not in known:
        near = (difflib.get_close_matches(role.model, known, n=1, cutoff=0.3) or known)[0]
        return f"--{role.name}-model {near}  (there: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''})"
    if known is None and not url.endswith("/v1") and models_at(f"{url}/v1", chat) is not None:
        return f"--{role.name}-base-url {url}/v1"
    if error.kind in ("Unreachable", "TimedOut", "ServerFailed"):
        return f"start the server, or correct its address: --{role.name}-base-url http://HOST:PORT/v1"
    if error.kind == "RateLimited":
        return "wait and run this again; in training fewer calls at once help: OpenAIChat(max_concurrency=8)"
    if error.status == 402 or "credit" in error.what:
        return f"add credit, or export {chat.endpoint.key_variable}=ANOTHER_KEY"
    return f"check the address and the name: --{role.name}-base-url http://HOST:PORT/v1 --{role.name}-model NAME"


def models_at(url: str, chat: OpenAIChat) -> list[str] | None:
    """The names of the models at an address; `None` if it does not say. An endpoint that asks for a key is one."""
    import openai

    key = chat.endpoint.find_key() or "none"
    with openai.OpenAI(api_key=key, base_url=url, max_retries=0, timeout=_SECONDS) as client:
        try:
            return sorted(model.id for model in client.models.list())
        except openai.AuthenticationError:
            return []
        except (openai.OpenAIError, AttributeError, ValueError, TypeError):  # no such list, or a page of something else
            return None
