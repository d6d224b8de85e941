"""Hugging Face Accelerate: its sharded data, accumulated gradients and gathered metrics over NetStorm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch.tools.training import Trained, assert_same_training, installed, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), installed("Accelerate", "accelerate")]

ACCELERATE = """
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object, set_seed

set_seed(7)
if backend == "netstorm":
    dist.init_process_group("netstorm", timeout=deadline)
    handlers = []
else:
    handlers = [InitProcessGroupKwargs(backend=backend, timeout=deadline)]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=handlers)
assert accelerator.num_processes == 2

samples = torch.randn(100, 8)
targets = samples @ torch.randn(8, 1)
torch.manual_seed(accelerator.process_index)  # DDP gives all ranks the first one's weights
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(samples, targets),
    batch_size=7,
    shuffle=True,
    generator=torch.Generator().manual_seed(3),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)

losses, counts = [], []
for epoch in range(3):
    errors = []
    for inputs, wanted in data:
        with accelerator.accumulate(model):
            predictions = model(inputs)
            loss = torch.nn.functional.mse_loss(predictions, wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        errors.append(accelerator.gather_for_metrics((predictions - wanted).detach()))
    counts.append(len(torch.cat(errors)))
accelerator.wait_for_everyone()
ranks = gather_object([accelerator.process_index])
report(accelerator.unwrap_model(model), losses, counts=counts, ranks=ranks)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("gloo"), ACCELERATE, "gloo")


LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0")
"""Accelerate's own launcher, which starts several processes a machine for GPUs alone; the script has none."""


@pytest.mark.parametrize(
    "way", ["netstorm's group, created first", "gloo, which means netstorm", "accelerate launch"]
)
def test_accelerate_trains_over_netstorm_as_over_gloo(way: str, over_gloo: Trained, tmp_path: Path) -> None:
    if way.startswith("netstorm"):
        trained = train(tmp_path, ACCELERATE, "netstorm")
    elif way == "accelerate launch":
        trained = train(tmp_path, ACCELERATE, "gloo", way=LAUNCH, NETSTORM_TORCH_BACKENDS="gloo")
    else:
        trained = train(tmp_path, ACCELERATE, "gloo", NETSTORM_TORCH_BACKENDS="gloo")
    assert_same_training(trained, over_gloo)
    for report in trained.reports:
        assert report["counts"] == [100, 100, 100]
        assert report["ranks"] == [0, 1]
