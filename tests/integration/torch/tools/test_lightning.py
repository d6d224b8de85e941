"""Lightning: its DDPStrategy over NetStorm, under torchrun and with ranks that Lightning starts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch.tools.training import TORCHRUN, Trained, assert_same_training, installed, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), installed("Lightning", "lightning")]

LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses, self.validated = [], []

    def training_step(self, batch, index):
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), wanted)
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch, index):
        inputs, wanted = batch
        self.log("validated", torch.nn.functional.mse_loss(self.net(inputs), wanted), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validated.append(self.trainer.callback_metrics["validated"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)

lightning.seed_everything(7)
samples = torch.randn(96, 8)
data = torch.utils.data.TensorDataset(samples, samples @ torch.randn(8, 1))
model = Regression()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=backend, timeout=deadline),
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    num_sanity_val_steps=0,
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = torch.utils.data.DataLoader
trainer.fit(model, loader(data, batch_size=8, shuffle=True), loader(data, batch_size=8))
assert trainer.world_size == 2
report(model, model.losses + model.validated, saved=files(folder / "checkpoints"))
"""


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("gloo"), LIGHTNING, "gloo")


@pytest.mark.parametrize("way", ["torchrun", "python"])
def test_lightning_trains_over_netstorm_as_over_gloo(way: str, over_gloo: Trained, tmp_path: Path) -> None:
    trained = train(tmp_path, LIGHTNING, "netstorm", way=TORCHRUN if way == "torchrun" else ())
    assert_same_training(trained, over_gloo)
    for report in trained.reports:
        assert len(report["losses"]) == 3 * 6 + 3
        assert report["saved"] == ["epoch=2-step=9.ckpt"]
