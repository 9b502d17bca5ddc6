"""Law 7 with the real engine and the real client: leave, and the engine stops."""

from openai import OpenAI

from dragoman.engines.local import LocalEngine
from tests.conformance.conftest import MODEL
from tests.support.wait import becomes


def test_closing_a_stream_stops_the_engine(base_url: str, engine: LocalEngine) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        stream = client.completions.create(
            model=MODEL,
            prompt="One, two,",
            max_tokens=1000,
            n=3,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        assert engine._worker._scheduler.busy
        stream.close()
        assert becomes(lambda: not engine._worker._scheduler.busy)
