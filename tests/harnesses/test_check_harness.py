"""The task with which `check-env --harness` tries a harness, with a stand-in that has tools for
files alone.
"""

import sys

from agentic_prompting.harnesses import Harness
from agentic_prompting.harnesses.check_harness import check_harness
from support.isolation import both_isolations

FILE_AGENT = """
import json, os, sys, urllib.request
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("write_file", "read_file")]
URL = os.environ["OWN_URL"] + "/chat/completions"
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": "agent", "messages": messages, "tools": TOOLS}).encode()
    request = urllib.request.Request(URL, body, {"x-api-key": os.environ["OWN_KEY"]})
    message = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        print(message["content"])
        break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        try:
            if call["function"]["name"] == "write_file":
                with open(arguments["path"], "w") as file:
                    file.write(arguments["content"])
            result = open(arguments["path"]).read()
        except OSError as error:
            result = str(error)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
"""


@both_isolations
def test_file_tools_write_into_the_work_folder(tmp_path, isolation):
    path = tmp_path / "agent.py"
    path.write_text(FILE_AGENT)
    harness = Harness(
        name="files",
        command=(sys.executable, str(path), "{task}"),
        dialects={"chat": ("", "{base_url}")},
        environment={"OWN_URL": "{url}", "OWN_KEY": "{api_key}"},
    )
    report = check_harness(harness, isolation)
    assert report["wrote_the_file"] and report["answer"] == "done", report
