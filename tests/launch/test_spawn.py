"""How the ranks of one machine begin."""

import paddle
import paddle.distributed as dist
import pytest

import main_multi_gpu


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("allocated", "remembered", "device", "method"),
    [
        (0, None, "cpu", "fork"),
        (4, None, "cpu", "spawn"),
        (0, "alone", "cpu", "spawn"),
        (0, None, "gpu:0", "spawn"),
    ],
)
def test_a_process_is_forked_only_where_it_has_not_used_paddle(
    allocated, remembered, device, method, monkeypatch
):
    x = paddle.zeros([1])
    # what tells that it has
    assert paddle.base.core.host_memory_stat_peak_value("Allocated", 0) >= 4 * x.size
    assert dist.get_world_size() == 1  # which Paddle remembers
    assert dist.parallel._global_parallel_env is not None
    monkeypatch.setattr(
        paddle.base.core, "host_memory_stat_peak_value", lambda kind, place: allocated
    )
    monkeypatch.setattr(dist.parallel, "_global_parallel_env", remembered)
    monkeypatch.setattr(paddle, "get_device", lambda: device)
    monkeypatch.setattr(dist, "spawn", lambda *args, start_method, **options: start_method)
    assert main_multi_gpu.spawn(print, 2, None, None) == method
