"""The service's OpenAPI description is true: requests made from it, right and wrong ones, are
answered as it says.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from agentic_prompting.llm import ScriptedChat
from support.serving import running, scripted_agent, service_of

HERE = {"Host": "localhost"}
PATHS = [
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/health",
    "/metrics",
    "/v1/responses",
    "/v1/messages",
    "/v1beta/models/{model}:generateContent",
    "/v1beta/models/{model}:streamGenerateContent",
]
# A conversation must end with a user's message that is not empty, which a schema cannot say: some
# of what the schema allows is a 400. And OpenAI's clients send fields that are ignored here, so not
# everything beside the schema is one.
LEFT_OUT = ("positive_data_acceptance", "negative_data_rejection")


@pytest.fixture(scope="module")
def description(tiny_policy):
    service = service_of(scripted_agent(tiny_policy, ScriptedChat(["the answer is Nairobi ."])))
    with running(service) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json", headers=HERE)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_answers_are_as_described(description, mode):
    statuses = set()
    for operation in (result.ok() for result in description.get_all_operations()):
        assert operation.path in PATHS
        if mode.is_positive or len(
            operation.body
        ):  # a request without anything in it cannot be wrong
            statuses |= statuses_of(operation, mode)
    assert (200 if mode.is_positive else 400) in statuses


def statuses_of(operation, mode):
    """Ask for one operation in many ways, each answer held against the description."""
    # Not with schemathesis' own pytest plugin, which does not work with pytest 9.
    left_out = [schemathesis.checks.CHECKS.get_one(name) for name in LEFT_OUT]
    statuses = set()

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def agrees(case):
        response = case.call(headers=HERE)
        case.validate_response(response, excluded_checks=left_out)
        statuses.add(response.status_code)

    agrees()
    return statuses
