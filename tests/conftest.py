import pytest
import torch

from tests import uninitialized


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors this small are several times slower when threads have to be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    uninitialized.fill()  # before each test: modules are imported as tests go on
