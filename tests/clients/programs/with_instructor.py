"""Instructor, in each of its modes for servers of OpenAI's API."""

import instructor
from openai import OpenAI
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Place(BaseModel):
    city: str


def made(url, mode, **more):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": cases.WHICH_CITY}],
        response_model=Place,
        max_retries=0,
        **more,
    )


def by_mode(name):
    @case("chat", name.lower())
    def run(url):
        assert "Paris" in made(url, getattr(instructor.Mode, name)).city

    return run


MODES = ("JSON", "JSON_SCHEMA", "TOOLS", "TOOLS_STRICT", "MD_JSON")
globals().update({f"by_{name}": by_mode(name) for name in MODES})

if __name__ == "__main__":
    cases.main(globals())
