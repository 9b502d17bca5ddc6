"""How the messages of vLLM's core are had: off its socket, or from its client where that is not possible.

The client has a task and a queue between the socket and its reader, and each of them costs a turn of the
event loop for every step of the model.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

Take: TypeAlias = Callable[[Sequence[Any]], None]


def reader(client: Any, take: Take) -> Callable[[], Coroutine[Any, Any, None]]:
    """What hands all that has come to `take`, again and again, until the core is dead: then it raises.

    From this call on, even if it does not run yet, the client does not read by itself.
    """
    return _SocketReader(client, take).run if _is_plain(client) else partial(_read_queue, client, take)


def _is_plain(client: Any) -> bool:
    """Whether the client does nothing with a message but what `_SocketReader` does."""
    resources = getattr(client, "resources", None)
    return (
        getattr(resources, "output_socket", None) is not None
        and getattr(resources, "output_queue_task", client) is None
        and all(hasattr(client, name) for name in ("decoder", "utility_results"))
        # Several cores, or some that may be lost: there it looks for more than outputs.
        and not hasattr(client, "process_engine_outputs")
        and not getattr(client, "_engine_status", None)
    )


async def _read_queue(client: Any, take: Take) -> None:
    waiting = getattr(client, "outputs_queue", None)
    while True:
        messages = [await client.get_output_async()]
        # The core may have gone on while the event loop had other things to do.
        while waiting is not None and not waiting.empty():
            messages.append(await client.get_output_async())
        take(messages)


class _SocketReader:
    def __init__(self, client: Any, take: Take) -> None:
        import zmq

        self._resources = client.resources
        self._decode = client.decoder.decode
        self._asked: dict[int, asyncio.Future[Any]] = client.utility_results
        self._take = take
        # The client's own is for asyncio; this is the same socket, without futures.
        self._socket = zmq.Socket.shadow(client.resources.output_socket)
        self._now, self._nothing = zmq.NOBLOCK, zmq.Again
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # In the place of the client's own reader: while there is one it starts no other, and it cancels the
        # one that there is when the core is dead.
        self._resources.output_queue_task = self._ended

    async def run(self) -> None:
        loop, number = asyncio.get_running_loop(), self._socket.FD
        # After what the loop has to do already: in a burst, that is to send the core more requests.
        loop.add_reader(number, loop.call_soon, self._readable)
        try:
            self._readable()
            await self._ended
        finally:
            loop.remove_reader(number)

    def _readable(self) -> None:
        """The socket tells of a change only once: all that is there must be read."""
        try:
            messages = []
            while (message := self._next()) is not None:
                if message.utility_output:
                    self._answer(message.utility_output)
                elif message.outputs:
                    messages.append(message)
            if messages:
                self._take(messages)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _next(self) -> Any:
        try:
            frames = self._socket.recv_multipart(self._now, copy=False)
        except self._nothing:
            return None
        self._resources.validate_alive(frames)
        return self._decode(frames)

    def _answer(self, told: Any) -> None:
        """What the core was asked beside requests."""
        asked = self._asked.pop(told.call_id, None)
        if asked is None or asked.done():
            return
        if told.failure_message is not None:
            asked.set_exception(RuntimeError(told.failure_message))
        else:
            asked.set_result(told.result.result)
