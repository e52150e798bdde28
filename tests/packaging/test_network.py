import socket

import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "example.org"])
def test_tests_cannot_leave_this_machine(host):
    with pytest.raises(RuntimeError, match="loopback only"):
        socket.create_connection((host, 80), timeout=1)


def test_loopback_is_open():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        assert client.getpeername() == server.getsockname()
