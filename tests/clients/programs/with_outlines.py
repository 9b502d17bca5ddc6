"""Outlines, as it speaks to OpenAI's API and to vLLM's server."""

import openai
import outlines
from outlines.types import Regex
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Place(BaseModel):
    city: str


def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@case("chat", "plain")
def plain(url):
    assert outlines.from_openai(client(url), MODEL)(cases.NAME_A_COLOUR) == cases.COLOUR


@case("chat", "stream")
def stream(url):
    assert "".join(outlines.from_openai(client(url), MODEL).stream(cases.NAME_A_COLOUR)) == cases.COLOUR


@case("chat", "an object")
def an_object(url):
    made = outlines.from_openai(client(url), MODEL)(cases.WHICH_CITY, Place)
    assert Place.model_validate_json(made) == Place(**cases.CITY)


@case("chat", "from_vllm: an object, a pattern")
def of_vllm(url):
    asked = outlines.from_vllm(client(url), MODEL)
    assert Place.model_validate_json(asked(cases.WHICH_CITY, Place)) == Place(**cases.CITY)
    assert asked(cases.NAME_A_COLOUR, Regex(r"Blue\.")) == cases.COLOUR


@case("chat", "from_sglang: an object, a pattern")
def of_sglang(url):
    asked = outlines.from_sglang(client(url), MODEL)
    assert Place.model_validate_json(asked(cases.WHICH_CITY, Place)) == Place(**cases.CITY)
    assert asked(cases.NAME_A_COLOUR, Regex(r"Blue\.")) == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
