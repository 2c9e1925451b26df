"""An engine process that is stopped by a signal: the server knows at once, and its requests go on
where they stood."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, wait_until


def test_a_stopped_engine_is_not_ready_until_it_goes_on(tiny: ServerProcess) -> None:
    """Red before: /ready and /ping stayed 200."""
    assert tiny.engine is not None
    with ThreadPoolExecutor(1) as pool:
        tiny.engine.send_signal(signal.SIGSTOP)
        try:
            wait_until(
                lambda: httpx.get(f"{tiny.url}/ready", timeout=PATIENCE_S).status_code == 503,
                timeout_s=PATIENCE_S,
            )
            assert [
                httpx.get(f"{tiny.url}{path}", timeout=PATIENCE_S).status_code
                for path in ("/ping", "/health", "/health_generate")
            ] == [503] * 3
            waiting = pool.submit(
                tiny.generate, text="a", sampling_params={"max_new_tokens": 4, "ignore_eos": True}
            )
            time.sleep(0.2)
            assert not waiting.done()
        finally:
            tiny.engine.send_signal(signal.SIGCONT)
        assert waiting.result()["meta_info"]["completion_tokens"] == 4
    wait_until(
        lambda: httpx.get(f"{tiny.url}/ready", timeout=PATIENCE_S).status_code == 200,
        timeout_s=PATIENCE_S,
    )
    assert httpx.get(f"{tiny.url}/health", timeout=PATIENCE_S).status_code == 200
