"""Messages that are no good HTTP/1.1, from tables: what is wrong with each, by name.

Every message has a second request behind it, which nobody may find if the first one is not understood.
"""

from collections.abc import Iterator
from typing import TypeAlias

Named: TypeAlias = tuple[str, bytes]

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
BODY = b'{"prompt": "hi"}'
CONTROLS = [byte for byte in (*range(0x20), 0x7F) if byte not in b"\t\r\n"]
DELIMITERS = b'"(),/:;<=>?@[\\]{}'
PATH = b"/tokenize"


def corpus() -> dict[str, bytes]:
    tables = (_lines, _targets, _names, _values, _endings, _lengths, _codings, _chunks, _trailers, _hosts)
    messages = {name: message + SMUGGLED for table in tables for name, message in table()}
    assert len(messages) == sum(len(list(table())) for table in tables), "two messages have one name"
    return messages


def get(line: bytes = b"GET /health HTTP/1.1\r\n", headers: bytes = HOST) -> bytes:
    return line + headers + b"\r\n"


def post(headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST " + PATH + b" HTTP/" + version + b"\r\n" + HOST + JSON + headers + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked\r\n", body)


def _of_byte(byte: int) -> str:
    return f"byte {byte:#04x}"


def _lines() -> Iterator[Named]:
    """Request lines."""
    for method in (
        b"", b"get", b"GET\t", b"G ET", b"G\x00ET", b"GETT", b"HTTP", b"(GET)", b"G\xc3\x89T",
        b"\x16\x03\x01", b"PRI",
    ):  # fmt: skip
        yield f"method {method!r}", get(method + b" /health HTTP/1.1\r\n")
    for version in (
        b"", b"HTTP", b"HTTP/", b"HTTP/1", b"HTTP/1.", b"HTTP/.1", b"HTTP/11", b"HTTP/1.1.1", b"HTTP/0.9",
        b"HTTP/1.2", b"HTTP/2.0", b"HTTP/3", b"HTTP/9.9", b"http/1.1", b"HTTP /1.1", b"HTTP/ 1.1",
        b"HTTP/1.1 ", b"HTTP/1.1\t", b"HTTP/1.1 x", b"HTTP/-1.1", b"HTTP/1.1\x00", b"HTTPS/1.1",
        b"RTSP/1.0", b"ICE/1.0",
    ):  # fmt: skip
        yield f"version {version!r}", get(b"GET /health " + version + b"\r\n")
    for name, line in {
        "no target": b"GET HTTP/1.1\r\n",
        "two targets": b"GET /health /health HTTP/1.1\r\n",
        "two spaces before the target": b"GET  /health HTTP/1.1\r\n",
        "two spaces behind the target": b"GET /health  HTTP/1.1\r\n",
        "tabs for spaces": b"GET\t/health\tHTTP/1.1\r\n",
        "a space first": b" GET /health HTTP/1.1\r\n",
        "a response": b"HTTP/1.1 200 OK\r\n",
        "nothing but a line": b"x\r\n",
        "no line": b":\r\n",
    }.items():
        yield f"line: {name}", get(line)


def _targets() -> Iterator[Named]:
    for byte in (*CONTROLS, 0x20, 0x09, 0x80, 0xC3, 0xFF):
        yield f"target: {_of_byte(byte)}", get(b"GET /hea" + bytes([byte]) + b"lth HTTP/1.1\r\n")
    for target in (
        b"health", b"*", b"http://localhost/health", b"http://a.example/health", b"localhost:80", b"?a",
        b"#a", b"http://", b"\\health", b"http:///health", b"javascript:1", b"http://a@localhost/health",
    ):  # fmt: skip
        yield f"target {target!r}", get(b"GET " + target + b" HTTP/1.1\r\n")
    yield "CONNECT", get(b"CONNECT localhost:80 HTTP/1.1\r\n")


def _names() -> Iterator[Named]:
    for byte in (*CONTROLS, 0x09, 0x20, *DELIMITERS, 0x80, 0xFF):
        if byte != ord(":"):
            yield f"name: {_of_byte(byte)}", get(headers=HOST + b"X-" + bytes([byte]) + b"A: 1\r\n")
            yield f"name ends in {_of_byte(byte)}", get(headers=HOST + b"X" + bytes([byte]) + b": 1\r\n")
        yield f"name begins with {_of_byte(byte)}", get(headers=HOST + bytes([byte]) + b"X: 1\r\n")
    for name, line in {
        "empty": b": 1",
        "alone": b"X",
        "with a space": b"X Y: 1",
        "of the length": b"Content-Length : 5",
    }.items():
        yield f"name: {name}", get(headers=HOST + line + b"\r\n")


def _values() -> Iterator[Named]:
    for byte in CONTROLS:
        yield f"value: {_of_byte(byte)}", get(headers=HOST + b"X: a" + bytes([byte]) + b"b\r\n")
        yield f"value ends in {_of_byte(byte)}", get(headers=HOST + b"X: a" + bytes([byte]) + b"\r\n")
        yield f"value begins with {_of_byte(byte)}", get(headers=HOST + b"X:" + bytes([byte]) + b"a\r\n")


def _endings() -> Iterator[Named]:
    """Ends of lines: each place in turn has a wrong one."""
    parts = (b"GET /health HTTP/1.1", b"Host: localhost", b"X: 1", b"")
    for ending in (
        b"\n", b"\r", b"\n\r", b"\r\r\n", b"\r\n ", b"\r\n\t", b"\r ", b"\x0b\n", b"\r\n\x0b", b"\r\n\x00",
        b"\x85", b" \n",
    ):  # fmt: skip
        for offset in range(len(parts)):
            ends = [ending if number == offset else b"\r\n" for number in range(len(parts))]
            message = b"".join(part + end for part, end in zip(parts, ends, strict=True))
            yield f"ending {ending!r} of line {offset}", message
    for name, folded in {
        "space": b"X: a\r\n b\r\n",
        "tab": b"X: a\r\n\tb\r\n",
        "first": b" X: a\r\n",
        "of the length": b"Content-Length:\r\n 5\r\n",
    }.items():
        yield f"folded: {name}", get(headers=HOST + folded)
        yield f"folded before the host: {name}", get(headers=folded + HOST)


def _lengths() -> Iterator[Named]:
    for length in (
        b"", b"-1", b"+16", b"0x10", b"16,16", b"16, 16", b"16,17", b"1 6", b"16;", b"1e1", b"1_6",
        b"16.0", b"\xd9\xa1", b"a", b"16a", b"a16", b"'16'", b"18446744073709551632",
        b"99999999999999999999999", b"16\x00", b"\x0b16", b"-0", b"0-16", b"16 16", b"NaN", b"16\x0c",
        b"\xc2\xb2",
    ):  # fmt: skip
        yield f"length {length!r}", post(b"Content-Length: " + length + b"\r\n", BODY)
    for one, two in ((16, 16), (16, 17), (0, 16), (16, 0), (5, 16)):
        for second in (b"Content-Length", b"content-length", b"CONTENT-LENGTH"):
            headers = b"Content-Length: %d\r\n%s: %d\r\n" % (one, second, two)
            yield f"lengths {one} and {two} as {second!r}", post(headers, BODY)


def _codings() -> Iterator[Named]:
    body = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"
    for coding in (
        b"", b"identity", b"gzip", b"xchunked", b"chunkedx", b"chunked, identity", b"chunked, gzip",
        b"chunked;q=1", b"chunked,", b"chunked chunked", b"chunked, chunked", b"'chunked'", b"\x0bchunked",
        b"chunked\x0b", b"chun ked", b"chunked\x00", b"identity, chunked, identity", b"gzip, identity",
        b"chunked/1", b"\xc2\xa0chunked", b"deflate", b", ", b"cHuNkEd, x",
    ):  # fmt: skip
        yield f"coding {coding!r}", post(b"Transfer-Encoding: " + coding + b"\r\n", body)
        with_length = b"Content-Length: %d\r\nTransfer-Encoding: %s\r\n" % (len(body), coding)
        yield f"coding {coding!r} behind a length", post(with_length, body)
    for length in (0, 4, len(body)):
        for name in (b"Transfer-Encoding", b"transfer-encoding", b"TRANSFER-ENCODING"):
            both = (b"%s: chunked\r\n" % name, b"Content-Length: %d\r\n" % length)
            yield f"{name!r} before length {length}", post(b"".join(both), body)
            yield f"{name!r} behind length {length}", post(b"".join(reversed(both)), body)
    for how, headers in {
        "space": b"Transfer-Encoding : chunked\r\n",
        "tab": b"Transfer-Encoding\t: chunked\r\n",
        "folded": b"Transfer-Encoding:\r\n chunked\r\n",
        "twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "twice, one unknown": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
        "twice, one identity": b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        "behind a bare line feed": b"X: 1\nTransfer-Encoding: chunked\r\n",
    }.items():
        yield f"coding: {how}", post(headers, body)
    yield "coding in HTTP/1.0", post(b"Transfer-Encoding: chunked\r\n", body, b"1.0")


def _chunks() -> Iterator[Named]:
    for size in (
        b"", b"-10", b"+10", b"0x10", b" 10", b"10 ", b"\t10", b"10\t", b"g", b"10g", b"1 0", b"10,",
        b"10\x00", b"\x0010", b"0x", b"ffffffffffffffff", b"10000000000000000",
        b"fffffffffffffffffffffffff", b"1_0", b"10\x0b", b"\xd9\xa110", b"10\r", b".10", b"10.0", b"-0",
        b"'10'",
    ):  # fmt: skip
        yield f"chunk size {size!r}", chunked(size + b"\r\n" + BODY + b"\r\n0\r\n\r\n")
    for extension in (b";\n", b";a\n", b";a=\x00", b";a=\x01b", b";a\rb", b";\x00", b";a=b\x7f"):
        yield f"chunk extension {extension!r}", chunked(b"10" + extension + b"\r\n" + BODY + b"\r\n0\r\n\r\n")
    for ending in (
        b"", b"\n", b"\r", b"XX", b"\n\n", b"\r\r", b"\n\r", b" \r\n", b"\x00\n", b"\r\n\r\n", b"\r\x00",
    ):  # fmt: skip
        yield f"chunk ends in {ending!r}", chunked(b"10\r\n" + BODY + ending + b"0\r\n\r\n")
        yield f"size ends in {ending!r}", chunked(b"10" + ending + BODY + b"\r\n0\r\n\r\n")
        if ending != b"\r\n\r\n":
            yield f"last size ends in {ending!r}", chunked(b"10\r\n" + BODY + b"\r\n0" + ending + b"\r\n")
            yield f"last line ends in {ending!r}", chunked(b"10\r\n" + BODY + b"\r\n0\r\n" + ending)
    for size in (b"f", b"11", b"1"):
        yield f"chunk of another size {size!r}", chunked(size + b"\r\n" + BODY + b"\r\n0\r\n\r\n")
    for last in (b"00x\r\n\r\n", b"0;\n\r\n", b"-0\r\n\r\n", b"0 0\r\n\r\n", b"\r\n\r\n"):
        yield f"last chunk {last!r}", chunked(b"10\r\n" + BODY + b"\r\n" + last)


def _trailers() -> Iterator[Named]:
    for trailer in (
        b"X\r\n", b": 1\r\n", b"X : 1\r\n", b" X: 1\r\n", b"X: a\r\n b\r\n", b"X: 1\n", b"X: a\x00b\r\n",
        b"X\x00: 1\r\n", b"X Y: 1\r\n", b"X: 1\r", b"X(: 1\r\n", b"\x80: 1\r\n", b"X: a\x01b\r\n",
    ):  # fmt: skip
        yield f"trailer {trailer!r}", chunked(b"10\r\n" + BODY + b"\r\n0\r\n" + trailer + b"\r\n")


def _hosts() -> Iterator[Named]:
    for host in (
        b"", b" ", b"a b", b"a/", b"a/?x=", b"a#", b"a/#", b"a?", b"a@b", b"a,b", b"localhost, localhost",
        b"a\\b", b"[::1", b"::1", b"localhost:", b"localhost:a", b"localhost:80:80", b"localhost:999999",
        b"http://localhost", b"\xc3\xa4", b"a%20b", b"[::1]a", b"<a>", b"'", b"*", b"localhost;",
        b"a\x7fb", b"a\tb",
    ):  # fmt: skip
        yield f"host {host!r}", get(headers=b"Host: " + host + b"\r\n")
    yield "no host", get(headers=b"")
    yield "two hosts", get(headers=HOST + HOST)
    yield "two hosts that differ", get(headers=HOST + b"Host: a.example\r\n")
