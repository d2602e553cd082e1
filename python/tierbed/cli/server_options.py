"""Options of ``tierbed serve`` about threads, limits and the log."""

from __future__ import annotations

from typing import Annotated

import typer

ConnectionsMax = Annotated[
    int, typer.Option("--connections-max", min=1, help="Connections open at once; more get a 503.")
]
RequestsMax = Annotated[
    int,
    typer.Option(
        "--requests-max",
        min=1,
        help="Requests worked on at once; more get a 503.",
    ),
]
BodyMax = Annotated[str, typer.Option("--body-max", help="Largest body accepted.")]
IndicesMax = Annotated[
    int, typer.Option("--indices-max", min=1, help="Most indices in one lookup.")
]
BagsMax = Annotated[
    int, typer.Option("--bags-max", min=1, help="Most bags in one lookup: samples times features.")
]
AnswerMax = Annotated[str, typer.Option("--answer-max", help="Largest answer to a lookup.")]
BufferMax = Annotated[
    str,
    typer.Option("--buffer-max", help="Bytes of all large bodies and answers in memory."),
]
HeadMsMax = Annotated[
    int, typer.Option("--head-ms-max", min=1, help="Longest time for a request's head.")
]
BodyMsMax = Annotated[
    int, typer.Option("--body-ms-max", min=1, help="Longest time for a request's body.")
]
BodyIdleMsMax = Annotated[
    int, typer.Option("--body-idle-ms-max", min=1, help="Longest pause within a body.")
]
RequestMsMax = Annotated[
    int, typer.Option("--request-ms-max", min=1, help="Longest time from a head to its answer.")
]
AnswerMsMax = Annotated[
    int,
    typer.Option("--answer-ms-max", min=1, help="Longest time to take an answer."),
]
IdleMsMax = Annotated[
    int,
    typer.Option("--idle-ms-max", min=1, help="Longest time between two requests."),
]
StopMsMax = Annotated[
    int,
    typer.Option("--stop-ms-max", min=1, help="Longest wait for requests when stopping."),
]
WorkerThreads = Annotated[
    int | None,
    typer.Option("--worker-threads", min=1, help="Threads that move bytes; by default up to 2."),
]
LookupThreads = Annotated[
    int | None,
    typer.Option(
        "--lookup-threads", min=1, help="Threads that look up and predict; by default the cores."
    ),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", help="off, error, warn or info: JSON lines on standard error.")
]
AccessLog = Annotated[
    bool, typer.Option("--access-log", help="Write a line for every request, at level info.")
]
SlowMs = Annotated[int, typer.Option("--slow-ms", min=0, help="Write requests that take longer.")]
