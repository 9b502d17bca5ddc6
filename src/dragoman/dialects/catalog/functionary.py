"""MeetKai's Functionary."""

from dragoman.dialects.declare import Channels, Dialect, NamedCalls

DIALECTS = (
    Dialect(
        name="functionary_v31",
        models="Functionary v3.1",
        calls=(NamedCalls(open=("<function=",), then=(">",), close=("</function>",)),),
        drops=("<|eom_id|>",),
    ),
    Dialect(
        name="functionary_v32",
        models="Functionary v3.2",
        channels=Channels(
            start=(">>>",),
            header=(),
            body="\n",
            text=frozenset({"all"}),
            written=("", "all\n{body}", "{name}\n{body}"),
        ),
    ),
)
