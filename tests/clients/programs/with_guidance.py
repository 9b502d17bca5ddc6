"""Guidance, as it speaks to vLLM's server: a grammar, and text in between."""

from guidance import assistant, gen, user
from guidance.models.experimental import VLLMModel

from tests.clients import cases
from tests.clients.cases import MODEL, case


def model(url):
    return VLLMModel(MODEL, base_url=url, api_key="none", echo=False)


@case("chat", "plain")
def plain(url):
    asked = model(url)
    with user():
        asked += cases.NAME_A_COLOUR
    with assistant():
        asked += gen("colour")
    assert asked["colour"] == cases.COLOUR


@case("chat", "a pattern")
def pattern(url):
    asked = model(url)
    with user():
        asked += cases.NAME_A_COLOUR
    with assistant():
        asked += gen("colour", regex=r"[A-Z][a-z]+\.")
    assert asked["colour"] == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
