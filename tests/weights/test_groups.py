"""Groups: the pickled id without vLLM, and broadcasts between a trainer and its workers."""

import ctypes
import io
import pickle
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from trl.weights.background import together
from trl.weights.groups import GlooGroup, _pickled_unique_id, open_store
from trl.weights.transfer import free_port

ID_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")


class WorkersId(ctypes.Structure):
    """What a worker makes of the pickle: its own class of that name."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Worker(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        return WorkersId if (module, name) == ID_CLASS else super().find_class(module, name)


def test_the_id_reaches_a_worker_byte_for_byte():
    raw = bytes((7 * i) % 256 for i in range(128))
    received = _Worker(io.BytesIO(_pickled_unique_id(raw))).load()
    assert isinstance(received, WorkersId)
    assert bytes(received) == raw


def test_making_the_id_leaves_no_vllm_behind():
    before = dict(sys.modules)
    _pickled_unique_id(bytes(128))
    assert [m for m in sys.modules if m.split(".")[0] == "vllm"] == []
    assert sys.modules.keys() == before.keys()


def test_an_id_of_another_length_is_refused():
    with pytest.raises(ValueError, match="Buffer size"):
        _pickled_unique_id(b"short")


def pair(port: int, timeout: float = 5.0) -> tuple[GlooGroup, GlooGroup]:
    """A trainer's and a worker's end."""
    store = open_store(port, 2, timeout)
    return together(
        lambda: GlooGroup("127.0.0.1", port, 1, 2, timeout),
        lambda: GlooGroup("", 0, 0, 2, timeout, store),
        timeout,
    )[::-1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_worker_receives_what_is_broadcast(dtype):
    trainer, worker = pair(free_port())
    sent, received = torch.arange(1000).to(dtype), torch.zeros(1000, dtype=dtype)
    together(lambda: worker.broadcast(received), lambda: trainer.broadcast(sent), 5.0)
    assert torch.equal(received, sent)
    trainer.close()
    worker.close()


def test_several_workers_receive_the_same():
    port, store_timeout = free_port(), 5.0
    store = open_store(port, 3, store_timeout)
    received = [torch.zeros(10), torch.zeros(10)]

    def work(rank: int) -> None:
        group = GlooGroup("127.0.0.1", port, rank, 3, store_timeout)
        group.broadcast(received[rank - 1])

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    trainer = GlooGroup("", 0, 0, 3, store_timeout, store)
    trainer.broadcast(torch.arange(10.0))
    for thread in threads:
        thread.join(5)
    assert all(torch.equal(r, torch.arange(10.0)) for r in received)
    trainer.close()


def test_joining_alone_ends_at_the_deadline():
    port = free_port()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooGroup("", 0, 0, 2, 0.5, open_store(port, 2, 0.5))
    assert time.monotonic() - began < 2.5


def test_a_closed_group_sends_nothing():
    trainer, worker = pair(free_port())
    trainer.close()
    with pytest.raises(RuntimeError, match="the group was closed"):
        trainer.broadcast(torch.zeros(1))
    with pytest.raises(RuntimeError):
        worker.broadcast(torch.zeros(1))
    worker.close()


def test_closing_does_not_wait_for_a_stuck_broadcast_and_its_port_comes_back():
    port = free_port()
    trainer, worker = pair(port, timeout=1.0)
    # More than fits into the buffers of a connection, and nobody receives it.
    stuck = threading.Thread(target=_quietly, args=(trainer, torch.zeros(1 << 26, dtype=torch.uint8)), daemon=True)
    stuck.start()
    time.sleep(0.1)
    began = time.monotonic()
    trainer.close()
    assert time.monotonic() - began < 0.5
    again = pair(port, timeout=4.0)
    for group in (*again, worker):
        group.close()
    stuck.join(5)


def _quietly(group: GlooGroup, tensor: torch.Tensor) -> None:
    try:
        group.broadcast(tensor)
    except RuntimeError:
        return


@pytest.mark.parametrize("use_libuv", [True, False])
def test_workers_find_the_id_in_a_store_that_did_not_wait_for_them(use_libuv):
    """They open theirs as clients that count themselves in."""
    port = free_port()
    store = open_store(port, 2, 5.0, use_libuv=use_libuv)
    store.set("broadcast_from/0/0", b"id")
    worker = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=5), use_libuv=False)
    assert worker.get("broadcast_from/0/0") == b"id"


def test_a_port_of_somebody_else_is_an_error_in_time():
    port = free_port()
    other = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        open_store(port, 2, 0.3)
    del other
