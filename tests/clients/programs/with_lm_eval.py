"""The evaluation harness: log probabilities of a text, and the tokenizer of the server."""

from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.clients import cases
from tests.clients.cases import MODEL, case


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]


def completions(url, **more):
    return LocalCompletionsAPI(base_url=f"{url}/completions", model=MODEL, max_retries=1, **more)


@case("completions", "plain")
def plain(url):
    lm = completions(url, tokenizer_backend=None, tokenized_requests=False)
    [text] = lm.generate_until(asked("generate_until", (cases.NAME_A_COLOUR, {"until": ["\n"]})))
    assert text == cases.COLOUR


def remote(url):
    lm = completions(url, tokenizer_backend="remote")
    assert lm.tok_encode("Blue") == list(b"Blue")
    [(logprob, _)] = lm.loglikelihood(asked("loglikelihood", ("The sky is", " blue")))
    assert logprob <= 0


if version("lm-eval") != "0.4.9":
    remote = case("completions", "tokenizer_backend=remote")(remote)


@case("chat", "plain")
def chat(url):
    lm = LocalChatCompletion(base_url=f"{url}/chat/completions", model=MODEL, max_retries=1)
    prompt = lm.apply_chat_template([{"role": "user", "content": cases.NAME_A_COLOUR}])
    [text] = lm.generate_until(asked("generate_until", (prompt, {"until": ["\n"]})))
    assert text == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
