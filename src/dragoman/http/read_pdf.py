"""Reads the text of a PDF, in a process of its own: a file of a stranger's, read by a library of somebody's.

It is run by its path and imports nothing of ours. The file comes by standard input; the answer is one object
of JSON: `{"text": ...}`, or `{"error": ...}` with a word for what is wrong. What it may take (memory, time,
files) is bounded before the library is loaded.
"""

import json
import resource
import sys
from io import BytesIO

MEMORY_BYTES = 1024 * 1024 * 1024
CPU_S = 20


def bound() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read(data: bytes, most_pages: int, most_chars: int) -> dict[str, str]:
    try:
        from pypdf import PdfReader
    except ImportError:
        return {"error": "no_reader"}
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "encrypted"}
        if len(reader.pages) > most_pages:
            return {"error": "too_many_pages"}
        texts: list[str] = []
        for page in reader.pages:
            texts.append(page.extract_text())
            if sum(map(len, texts)) > most_chars:
                return {"error": "too_much_text"}
        return {"text": "\n\n".join(texts)}
    except Exception:
        # Whatever it is: the text of it is for nobody.
        return {"error": "unreadable"}


if __name__ == "__main__":
    bound()
    answer = read(sys.stdin.buffer.read(), int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(json.dumps(answer))
