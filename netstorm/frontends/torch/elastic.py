"""Elastic jobs of PyTorch: ranks die, come back and join while the others train on.

    from netstorm.frontends.torch import elastic

    elastic.init_process_group()
    model = elastic.data_parallel(model)
    sampler = elastic.ElasticSampler(len(samples), batch_size=32)
    state = elastic.ElasticState(model=model, optimizer=optimizer, sampler=sampler)
    while state.step() < steps:
        inputs, labels = samples[sampler.take()]
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

Without `NETSTORM_ELASTIC=MIN:MAX` the same program runs as any other, and the loss of a rank ends the job.
"""

from netstorm.frontends.torch.elastic.data_parallel import average_hook, data_parallel
from netstorm.frontends.torch.elastic.joining import init_process_group
from netstorm.frontends.torch.elastic.ranks import contributors, is_newcomer, live_ranks
from netstorm.frontends.torch.elastic.sampler import ElasticSampler
from netstorm.frontends.torch.elastic.state import ElasticState

__all__ = [
    "ElasticSampler",
    "ElasticState",
    "average_hook",
    "contributors",
    "data_parallel",
    "init_process_group",
    "is_newcomer",
    "live_ranks",
]
