import pytest
import torch

torch.set_num_threads(1)  # the tests are small: more threads wait for each other longer than they work


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
