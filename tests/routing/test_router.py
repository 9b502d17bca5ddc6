"""The laws of routing: a bound on load, few changes where replicas come and go, little memory, no chance."""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.media import Media, MediaSpan
from dragoman.routing import Router, RoutingKey, key_of_body, key_of_ids
from dragoman.routing.key import BLOCK
from dragoman.routing.router import FEW, HOMES, SLACK

QUICK = settings(max_examples=60, deadline=None)


def router_of(count: int, most: int = 4096) -> Router:
    router = Router(most)
    for number in range(count):
        router.add(f"r{number}")
    return router


def send(router: Router, key: RoutingKey) -> str:
    name = router.rank(key)[0]
    router.begin(key, name)
    return name


def words(seed: int, blocks: int = 8) -> list[int]:
    """Ids that begin as no others do."""
    return [seed * 1000 + index for index in range(blocks * BLOCK)]


KEYS = st.builds(
    lambda shared, own, blocks: key_of_ids(words(shared, 6) + words(100 + own, blocks)),
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(0, 40),
)
COUNTS = st.integers(1, 2 * FEW + 3)


# A bound on load.


@QUICK
@given(COUNTS, st.lists(st.tuples(KEYS, st.booleans()), max_size=120))
def test_nobody_gets_more_than_the_bound(count: int, asked: list[tuple[RoutingKey, bool]]) -> None:
    router, running = router_of(count), list[str]()
    for key, ends in asked:
        bound = router.bound()
        running.append(send(router, key))
        assert router.running(running[-1]) <= bound
        if ends:
            router.end(running.pop(0))
    assert {name: router.running(name) for name in router.names} == {
        name: running.count(name) for name in router.names
    }


def test_a_hot_beginning_spreads() -> None:
    router, key = router_of(20), key_of_ids(words(1, 64))
    sent = Counter(send(router, key) for _ in range(200))
    assert max(sent.values()) <= 13  # a quarter above the average of ten
    assert len(sent) >= 200 / 13


def test_a_hot_beginning_stays_together_while_it_can() -> None:
    router, key = router_of(20), key_of_ids(words(1, 64))
    assert len({send(router, key) for _ in range(SLACK)}) == 1


# Where beginnings are known.


@QUICK
@given(COUNTS, st.integers(0, 99), st.integers(4, 200), st.integers(1, 60))
def test_a_conversation_goes_where_it_was(count: int, seed: int, first: int, more: int) -> None:
    router = router_of(count)
    before = key_of_ids(words(seed, first))
    name = send(router, before)
    router.end(name)
    assert router.rank(key_of_ids(words(seed, first) + words(seed + 1000, more)))[0] == name


def test_what_is_new_goes_to_the_least_busy() -> None:
    router = router_of(3)
    router.set_load("r0", 3)
    router.set_load("r2", 2)
    assert router.rank(key_of_ids(words(1)))[0] == "r1"


def test_load_weighs_against_what_is_known() -> None:
    router, key = router_of(2), key_of_ids(words(1, 8))
    name = send(router, key)
    router.set_load(name, 3)
    assert router.rank(key)[0] != name  # 256 tokens are computed sooner than three others are waited for
    long = key_of_ids(words(1, 128))
    router.begin(long, name)
    router.set_load(name, 3)
    assert router.rank(long)[0] == name


def test_salts_and_pictures_keep_beginnings_apart() -> None:
    ids = words(1)
    shown = [
        MediaSpan(Media(kind="image", format="png", data=b"", digest=digest), 3, 2) for digest in ("a", "b")
    ]
    keys = [key_of_ids(ids), key_of_ids(ids, "mine"), *(key_of_ids(ids, "", [span]) for span in shown)]
    assert len({key.prefix_digests for key in keys}) == 4
    late = MediaSpan(shown[0].media, len(ids) - 2, 2)
    assert key_of_ids(ids, "", [late]).prefix_digests[:4] == key_of_ids(ids).prefix_digests[:4]


def test_a_session_goes_where_it_was_though_its_words_are_others() -> None:
    router = router_of(12)
    name = send(router, key_of_ids(words(1), hints=["s"], owner="o"))
    router.end(name)
    assert router.rank(key_of_ids(words(2), hints=["s"], owner="o"))[0] == name
    others = {router.rank(key_of_ids(words(2), hints=["s"], owner=f"p{number}"))[0] for number in range(12)}
    assert others != {name}


def test_a_response_is_continued_where_it_was_made() -> None:
    router = router_of(12)
    router.remember("resp_1", "r7", "o")
    key = key_of_body(b'{"previous_response_id": "resp_1", "input": "go on"}', owner="o")
    assert router.rank(key)[0] == "r7"


# Replicas that come, go, restart and drain.


@QUICK
@given(st.integers(2, 30), st.integers(0, 400))
def test_one_that_comes_takes_only_what_is_its_own(count: int, seed: int) -> None:
    router, key = router_of(count), key_of_ids(words(seed))
    before = router.rank(key)[0]
    router.add("new")
    assert router.rank(key)[0] in (before, "new")
    router.remove("new")
    assert router.rank(key)[0] == before


@QUICK
@given(st.integers(2, 30), st.integers(0, 400))
def test_one_that_goes_is_missed_by_its_own_alone(count: int, seed: int) -> None:
    router, key = router_of(count), key_of_ids(words(seed))
    before = router.rank(key)[0]
    gone = next(name for name in router.names if name != before)
    router.remove(gone)
    assert router.rank(key)[0] == before
    router.remove(before)
    assert before not in router.rank(key)


def test_one_that_was_restarted_is_known_for_nothing() -> None:
    router, key = router_of(12), key_of_ids(words(1, 128))
    name = next(each for each in router.names if each != router.rank(key)[0])
    router.begin(key, name)
    router.end(name)
    assert router.rank(key)[0] == name
    router.restart(name)
    assert router.rank(key)[0] != name


def test_one_that_drains_gets_nothing_new_if_there_is_another() -> None:
    router, key = router_of(2), key_of_ids(words(1, 128))
    name = send(router, key)
    router.drain(name)
    assert name not in router.rank(key)
    for each in router.names:
        router.drain(each)
    assert router.rank(key)[0] == name
    router.drain(name, False)
    assert router.rank(key) == [name]


def test_those_to_avoid_are_taken_if_there_is_nobody_else() -> None:
    router, key = router_of(2), key_of_ids(words(1))
    assert router.rank(key, ["r0"]) == ["r1"]
    assert set(router.rank(key, ["r0", "r1"])) == {"r0", "r1"}
    assert Router().rank(key) == []


# Memory, and chance.


@QUICK
@given(st.lists(KEYS, max_size=150))
def test_memory_has_a_bound(asked: list[RoutingKey]) -> None:
    router = router_of(5, most=32)
    for key in asked:
        router.end(send(router, key))
    assert router.kept <= 32
    assert all(len(homes) <= HOMES for homes in (*router._young.values(), *router._old.values()))


@QUICK
@given(COUNTS, st.lists(KEYS, max_size=60), KEYS)
def test_the_same_state_gives_the_same_answer(count: int, asked: list[RoutingKey], last: RoutingKey) -> None:
    one, other = router_of(count), router_of(count)
    for key in asked:
        assert send(one, key) == send(other, key)
    assert one.rank(last) == one.rank(last) == other.rank(last)


@QUICK
@given(st.lists(st.integers(0, 2**31), max_size=9000))
def test_a_prompt_has_few_digests(ids: list[int]) -> None:
    key = key_of_ids(ids * 20)
    assert len(key.prefix_digests) <= 130
    assert len(key.remembered_digests) <= 16


def test_routers_that_tell_each_other_agree() -> None:
    one, other = router_of(12), router_of(12)
    keys = [key_of_ids(words(seed, 16)) for seed in range(20)]
    for key in keys:
        one.begin(key, f"r{key.ring_position % 12}")
        one.end(f"r{key.ring_position % 12}")
    index, news = one.updates_since()
    other.apply_updates(news)
    assert [other.rank(key)[0] for key in keys] == [one.rank(key)[0] for key in keys]
    assert one.updates_since(index) == (index, [])
    assert other.updates_since() == (0, [])


# Bodies of requests.


def chat(*texts: str, **fields: object) -> bytes:
    messages = [
        {"role": role, "content": text}
        for role, text in zip(["system", *["user", "assistant"] * 9], texts, strict=False)
    ]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_turns_of_a_chat_find_each_other() -> None:
    router = router_of(12)
    system, text = "Be kind. " * 40, "word " * 200
    name = send(router, key_of_body(chat(system, text)))
    router.end(name)
    assert router.rank(key_of_body(chat(system, text, text, "and then?")))[0] == name


def test_routers_that_never_met_agree_on_a_chat() -> None:
    system = "Be kind. " * 40
    homes = {
        key_of_body(chat(system, "What is this?", *["more"] * count)).ring_position for count in range(6)
    }
    assert len(homes) == 1
    assert key_of_body(chat(system, "What is that?")).ring_position not in homes


def test_every_api_has_beginnings() -> None:
    text = "word " * 400
    for body in (
        {"messages": [{"role": "user", "content": text}]},
        {"system": text, "messages": [{"role": "user", "content": "x"}]},
        {"prompt": text},
        {"prompt": [7] * 400},
        {"input": text},
        {"instructions": text, "input": [{"role": "user", "content": "x"}]},
    ):
        assert key_of_body(json.dumps(body).encode()).prefix_digests, body


def test_hints_are_found_in_headers_and_fields() -> None:
    plain = key_of_body(chat("a", "b"))
    hinted = [
        key_of_body(chat("a", "b"), {"x-session-id": "s"}),
        key_of_body(chat("a", "b", prompt_cache_key="s")),
        key_of_body(chat("a", "b", conversation="s")),
        key_of_body(chat("a", "b", conversation={"id": "s"})),
    ]
    assert plain.hints == ()
    assert len({key.hints for key in hinted}) == len({key.ring_position for key in hinted}) == 1


@QUICK
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.text(max_size=9) | st.integers(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["messages", "input", "prompt", "conversation", "model", "tools"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_body_is_routed(body: bytes) -> None:
    assert router_of(3).rank(key_of_body(body))
