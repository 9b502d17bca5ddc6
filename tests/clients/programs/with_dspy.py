"""DSPy: a signature, and an agent that calls a tool by what its adapter writes."""

import dspy

from tests.clients import cases
from tests.clients.cases import MODEL, case


def lm(url, **more):
    return dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", cache=False, num_retries=0, **more)


@case("chat", "plain")
def plain(url):
    assert lm(url)(cases.NAME_A_COLOUR) == [cases.COLOUR]


@case("completions", "plain")
def text(url):
    assert lm(url, model_type="text")(cases.NAME_A_COLOUR) == [cases.COLOUR]


@case("responses", "plain")
def responses(url):
    [made] = lm(url, model_type="responses")(cases.NAME_A_COLOUR)
    assert (made["text"] if isinstance(made, dict) else made) == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
