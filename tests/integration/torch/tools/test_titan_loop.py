"""A loop as TorchTitan's: FSDP2, clipped gradients, a schedule, torchdata's stateful loader, and PyTorch's
distributed checkpoints, written in the background and loaded in the middle of an epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch.tools.training import Trained, assert_same_training, installed, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), installed("torchdata", "torchdata")]

TITAN = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

STEPS, SAVED_AT = 30, 17  # an epoch has 12 steps

dist.init_process_group(backend, timeout=deadline)
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
saving = dist.new_group(backend=backend, timeout=deadline)  # Gloo's default group is the training's alone
samples = torch.randn(96, 8)
data = torch.utils.data.TensorDataset(samples, samples @ torch.randn(8, 1))


class Training:
    def __init__(self):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 5))
        self.sampler = StatefulDistributedSampler(data, ranks, rank, shuffle=True, seed=3)
        self.loader = StatefulDataLoader(data, batch_size=4, sampler=self.sampler, num_workers=0)
        self.step, self.losses = 0, []

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {
            "loader": self.loader.state_dict(),
            "epoch": self.sampler.epoch,  # of which torchdata's state says nothing
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }
        return {"model": model, "optimizer": optimizer, f"rank {rank}": own}

    def load(self, folder):
        saved = self.state()
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        own = saved[f"rank {rank}"]
        self.sampler.set_epoch(own["epoch"])
        self.loader.load_state_dict(own["loader"])
        self.schedule.load_state_dict(own["schedule"])
        self.step = own["step"]

    def run(self, until, saved_at=None):
        pending = None
        while True:
            for inputs, wanted in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(inputs), wanted)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean, dist.ReduceOp.SUM)
                self.losses.append(mean.item() / ranks)
                self.step += 1
                if self.step == saved_at:
                    pending = dcp.async_save(
                        self.state(), checkpoint_id=folder / "saved", process_group=saving
                    )
                if self.step == until:
                    if pending is not None:
                        pending.result()
                    return
            self.sampler.set_epoch(self.step)


training = Training()
training.run(STEPS, SAVED_AT)
resumed = Training()
resumed.load(folder / "saved")
resumed.run(STEPS)

def whole(model):
    full = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    full.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return full

report(
    whole(training.model), training.losses,
    resumed=resumed.losses, began=SAVED_AT,
    same=all(torch.equal(a, b) for a, b in zip(
        whole(training.model).parameters(), whole(resumed.model).parameters(), strict=True)),
)
dist.destroy_process_group()
"""


def test_a_loop_as_torchtitans_trains_over_netstorm_as_over_gloo_and_resumes(tmp_path: Path) -> None:
    over_gloo, trained = (train(tmp_path / backend, TITAN, backend) for backend in ("gloo", "netstorm"))
    assert_same_training(trained, over_gloo)
    check_resumed(trained)


def check_resumed(trained: Trained) -> None:
    """Assert that the training that was loaded has gone on as the one that was saved."""
    for report in trained.reports:
        assert report["resumed"] == report["losses"][report["began"] :]
        assert report["same"]
