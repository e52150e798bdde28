"""The `serve` command: bind, answer at once, load behind it."""

import signal
import socket
import sys
from contextlib import ExitStack
from types import FrameType
from typing import Annotated, Never

import typer
import uvicorn

from ragflash import log
from ragflash.api.app import api_config, create_app
from ragflash.api.deps import Services
from ragflash.cli.model_host import ModelHost
from ragflash.cli.options import (
    CtxOption,
    DataDirOption,
    DeviceOption,
    KvOption,
    ModelOption,
    SlotsOption,
    VerifyRowsOption,
    VramOption,
)
from ragflash.cli.output import Output
from ragflash.cli.parts import EngineSlot, model_path, open_library
from ragflash.cli.session_files import session_archive
from ragflash.errors import SettingInvalid
from ragflash.settings import Settings, load_settings

_GRACE_S = 5


def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to bind to. [env: RAGFLASH_HOST]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="TCP port; 0 takes a free one. [env: RAGFLASH_PORT]")
    ] = None,
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    vram_gb: VramOption = None,
    context_tokens: CtxOption = None,
    kv_format: KvOption = None,
    max_slots: SlotsOption = None,
    verify_rows: VerifyRowsOption = None,
) -> None:
    """Serve documents, answers and chat over HTTP.

    Everything else is set by RAGFLASH_* variables.
    """
    with Output(as_json=False) as output:
        settings = load_settings(
            host=host,
            port=port,
            data_dir=data_dir,
            model=model,
            device=device,
            vram_gb=vram_gb,
            context_tokens=context_tokens,
            kv_format=kv_format,
            max_slots=max_slots,
            verify_rows=verify_rows,
        )
        run(settings, output)


def run(settings: Settings, output: Output) -> None:
    """Serve until a signal comes.

    Raises:
        RagflashError: The server could not start, or could not load what it serves.
    """
    log.configure(settings.log_level, settings.log_format)
    services = Services(api_config(settings))
    model_path(settings)  # a missing model is told before anybody connects
    with bind(settings.host, settings.port) as listener, ExitStack() as parts:
        signal.signal(signal.SIGTERM, _terminate)
        app = create_app(services, lambda: _load(settings, services, parts, server))
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = uvicorn.Server(config)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if listener.family is socket.AF_INET6 else host
        output.complain(f"ragflash answers at http://{shown}:{port}")
        server.run(sockets=[listener])
    if services.failure is not None:
        raise services.failure


def bind(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    Raises:
        SettingInvalid: The port is taken, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingInvalid(f"the address {host}:{port} cannot be used: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # who connects before the server runs waits, and is not refused
    except OSError as error:
        listener.close()
        raise SettingInvalid(
            f"port {port} on {host} cannot be used ({error.strerror}): stop what uses it, or "
            "choose another with --port or RAGFLASH_PORT (0 takes a free one)"
        ) from error
    return listener


def _load(settings: Settings, services: Services, parts: ExitStack, server: uvicorn.Server) -> None:
    """Fill the services; a server that can never serve ends."""
    loaded = False
    try:
        slot = EngineSlot()
        library = open_library(settings, slot)
        parts.callback(library.close)
        services.provide_library(library)
        archive = parts.enter_context(session_archive(settings, slot))
        host = ModelHost(settings, services, library, slot, archive)
        if archive is not None and slot.sessions is not None:
            services.provide_sessions(slot.sessions, archive.counts)
        parts.callback(host.close)
        parts.callback(library.prefills.close)
        host.start()
        services.provide_models(host)
        loaded = True
    finally:
        server.should_exit = server.should_exit or not loaded


def _terminate(number: int, frame: FrameType | None) -> Never:
    """End like on Ctrl-C, so that the data folder is closed properly."""
    sys.exit(128 + number)
