"""A command-line agent for tests: asks the policy, a large LLM, the policy; writes a file; leaves a
child behind.

Run by path, with the standard library alone.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request


def ask(model: str, *messages: dict[str, str]) -> str:
    body = json.dumps({"model": model, "messages": list(messages)}).encode()
    headers = {"Authorization": f"Bearer {os.environ['KEY']}"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"] or "")


def main(question: str) -> None:
    subprocess.Popen([sys.executable, "-S", __file__], start_new_session=True)
    first = {"role": "user", "content": question}
    completion = ask("agent", first)
    heard = ask("oracle", {"role": "user", "content": f"{question} {completion}"})
    last = ask(
        "agent",
        first,
        {"role": "assistant", "content": completion},
        {"role": "user", "content": heard},
    )
    with open("answer.txt", "w") as file:
        file.write(last)
    print(last or "nothing")


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else time.sleep(1000)
