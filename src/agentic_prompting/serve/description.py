"""[`describe`]: the OpenAPI description of the service."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ..programs.protocol import MAX_MESSAGES

# The errors of the service, by HTTP status.
_ERRORS = {
    400: "The request cannot be read",
    401: "The key is missing or wrong",
    402: "The request came to cost more than one may",
    403: "Not for this service's host, which has no key",
    404: "No such model",
    408: "The request's body did not arrive in time",
    413: "The request is too large",
    415: "The body is compressed",
    429: "Too many requests at once",
    502: "A model behind this one failed",
    503: "A model behind this one cannot be asked at present",
    504: "The request took longer than one may",
}

# Schemas of parts of the bodies.
_TEXT = {"type": "string"}
_MESSAGE = {
    "type": "object",
    "description": "Text only; of a reply without an answer it is the refusal.",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
                {"type": "null"},
            ]
        },
        "refusal": {"type": ["string", "null"]},
    },
}
_ERROR_BODY = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

# Other formats of the same question: their vendors describe them.
_OTHER_FORMATS = {
    "/v1/responses": "OpenAI's Responses.",
    "/v1/messages": "Anthropic's Messages.",
    "/v1beta/models/{model}:generateContent": "Google's generateContent.",
    "/v1beta/models/{model}:streamGenerateContent": "Google's streamGenerateContent, with alt=sse.",
}


def describe(models: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI description.

    Args:
        models (`Sequence[str]`): The names of the models.
    """
    # The paths with their errors. `/health` needs no key.
    access_errors = _describe_errors(401, 403)
    paths: dict[str, Any] = {
        "/v1/chat/completions": {
            "post": {
                "summary": (
                    "An answer to a conversation, in the format of OpenAI's chat completions."
                ),
                "requestBody": _describe_body({"$ref": "#/components/schemas/ChatRequest"}),
                "responses": {"200": _ANSWER, **_describe_errors(*_ERRORS)},
            }
        },
        "/v1/models": {
            "get": {
                "summary": "The models that can be asked.",
                "responses": {"200": _describe_json("The models"), **access_errors},
            }
        },
        "/v1/models/{model}": {
            "get": {
                "summary": "One of the models.",
                "parameters": [_path_parameter("model", models)],
                "responses": {
                    "200": _describe_json("The model"),
                    **_describe_errors(401, 403, 404),
                },
            }
        },
        "/health": {
            "get": {
                "summary": "Whether the service can answer.",
                "responses": {
                    "200": _describe_json("It can"),
                    "503": _describe_json("The service has failed: start it again"),
                },
            }
        },
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus.",
                "responses": {
                    "200": {"description": "The counters", "content": {"text/plain": {}}},
                    **access_errors,
                },
            }
        },
    }

    # Only the format of chat completions is described in full.
    for path, summary in _OTHER_FORMATS.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "requestBody": _describe_body({"type": "object"}),
            "responses": {
                "200": _ANSWER,
                **{str(status): _describe_json(text) for status, text in _ERRORS.items()},
            },
        }
        if "{model}" in path:
            operation["parameters"] = [_path_parameter("model", models)]
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentic-prompting", "version": version("agentic-prompting")},
        "paths": paths,
        "components": {
            "schemas": {"ChatRequest": _describe_chat_request(models), "ErrorBody": _ERROR_BODY}
        },
    }


# The request says whether the answer is streamed.
_ANSWER = {
    "description": "The answer, whole or as a stream of events",
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": _TEXT},
    },
}


def _describe_chat_request(models: Sequence[str]) -> dict[str, Any]:
    # Null means the same as leaving a field out.
    token_limit = {"type": ["integer", "null"], "minimum": 1}
    boolean = {"type": ["boolean", "null"]}
    return {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": {"enum": list(models), "description": "A name from /v1/models."},
            "messages": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_MESSAGES,
                "items": _MESSAGE,
                "description": "Must end with a user's message: the question.",
            },
            "stream": {**boolean, "description": "Send the answer in pieces, once it is there."},
            "stream_options": {
                "type": ["object", "null"],
                "properties": {"include_usage": boolean},
            },
            "seed": {
                "type": ["integer", "null"],
                "minimum": -(2**63),
                "maximum": 2**63 - 1,
                "description": "The same seed gives the same answer.",
            },
            "max_tokens": {
                **token_limit,
                "description": "Of all turns of the agent and replies together.",
            },
            "max_completion_tokens": {**token_limit, "description": "The same."},
            "n": {"enum": [1, None], "description": "Only one choice a request is offered."},
            "temperature": {
                "type": ["number", "null"],
                "minimum": 0,
                "maximum": 2,
                "description": "0 takes the likeliest token each time. Others are ignored.",
            },
            "row": {
                "type": ["object", "null"],
                "description": "Fields of the row that an agent program reads beside the question.",
            },
            "trajectory": {
                **boolean,
                "description": "Send `trajectory`, how the answer came about, as well.",
            },
            "progress": {
                **boolean,
                "description": "In a stream: send `progress` before and after each call.",
            },
        },
    }


def _describe_errors(*statuses: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    return {
        str(status): {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def _describe_json(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }


def _describe_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _path_parameter(name: str, values: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"enum": list(values)}}
