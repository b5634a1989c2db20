"""What a server logs when it is told to end: nothing that looks like a failure."""

from __future__ import annotations

import os
import signal


def test_a_server_with_several_api_processes_ends_without_a_false_alarm(make_server):
    server = make_server(fresh=True, grpc_port=None, api_server_count=2)
    for pid in (server.engine_pid, *server.api_pids, *server.store_pids):
        assert os.getpgid(pid) == pid  # Ctrl-C reaches the supervisor only
    server.process.send_signal(signal.SIGHUP)  # the terminal is closed
    assert server.process.wait(30) == 0
    assert "ERROR" not in server.errors() and "Traceback" not in server.errors()
