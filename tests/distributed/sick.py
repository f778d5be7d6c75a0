"""Small broken programs on 2 gloo ranks, each a fault that has occurred, and each with the fix that the doctor offers.

torchrun --nproc_per_node 2 tests/distributed/sick.py OUT.json
Rank 0 writes {case: {"broken": finding, "mended": finding}}.
"""

import contextlib
import copy
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_ft.diagnosis import accumulation, curve, order, replicas, resume, sampling, strides
from accel_ft.diagnosis.finding import Finding, gather

ROWS = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20) % 2)


def ids(batch):
    return batch[0][:, 0].int().tolist()


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# Gradient strides that differ from DDP's buckets.


def conv_step(mend):
    """Run a backward pass of a conv net on channels_last images; return finding, whether PyTorch warned, gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 64, 3), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(4, 1, 8, 8).to(memory_format=torch.channels_last)
    net(images)
    if mend == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    if mend == "hook that does nothing":
        for p in net.parameters():
            p.register_hook(lambda gradient: gradient.contiguous())
    if mend == "match_strides":
        strides.match_strides(net)
    finding = strides.gradient_strides(net, lambda: net(images).square().mean())
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp(images).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    return finding, any("Grad strides do not match" in str(w.message) for w in caught), gradients


def strided():
    broken, warned, gradients = conv_step(None)
    result = {"broken": broken, "warned": [warned]}
    for mend in ("hook that does nothing", "channels_last", "match_strides"):
        result[mend], warned, mended = conv_step(mend)
        result["warned"].append(warned)
        assert all(torch.allclose(mended[name], gradients[name]) for name in gradients)
    return result


# Every rank reads the same data.


def same_data():
    unsharded = DataLoader(ROWS, batch_size=4, shuffle=True)
    sampler = DistributedSampler(ROWS, shuffle=True)
    sharded = DataLoader(ROWS, batch_size=4, sampler=sampler)
    return {
        "broken": sampling.training_sampling(unsharded, 20, ids),
        "mended": sampling.training_sampling(sharded, 20, ids, sampler.set_epoch),
        "a rank too few": sampling.training_sampling(
            DataLoader(ROWS, 2, sampler=DistributedSampler(ROWS, num_replicas=3, rank=dist.get_rank())), 20, ids,
        ),
    }  # fmt: skip


def no_set_epoch():
    sampler = DistributedSampler(ROWS, shuffle=True)
    loader = DataLoader(ROWS, batch_size=4, sampler=sampler)
    return {
        "broken": sampling.training_sampling(loader, 20, ids),
        "mended": sampling.training_sampling(loader, 20, ids, sampler.set_epoch),
    }


def epoch_of_one_rank():
    """`set_epoch` is called on rank 0 only: from the second epoch on, the shares overlap."""
    sampler = DistributedSampler(ROWS, shuffle=True)
    loader = DataLoader(ROWS, batch_size=2, sampler=sampler)
    alone = sampler.set_epoch if dist.get_rank() == 0 else lambda epoch: None
    return {
        "broken": sampling.training_sampling(loader, 20, ids, alone),
        "mended": sampling.training_sampling(loader, 20, ids, sampler.set_epoch),
    }


def uneven_loaders():
    """Each rank takes its own share of a stream of 18 rows: 5 batches and 4."""

    class Shared(torch.utils.data.IterableDataset):
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            order = torch.randperm(18, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            mine = order[:10] if dist.get_rank() == 0 else order[10:]
            return iter([(*ROWS[row][:1], row) for row in mine])

    sampler = DistributedSampler(ROWS, shuffle=True)
    sharded = DataLoader(ROWS, batch_size=2, sampler=sampler)
    return {
        "broken": sampling.training_sampling(DataLoader(Shared(), 2), 18, lambda batch: batch[1]),
        "mended": sampling.training_sampling(sharded, 20, ids, sampler.set_epoch),
    }


def padded_evaluation():
    rows = torch.utils.data.Subset(ROWS, range(19))
    padded = DataLoader(rows, 4, sampler=DistributedSampler(rows, shuffle=False))
    mine = torch.utils.data.Subset(rows, range(dist.get_rank(), 19, 2))
    return {
        "broken": sampling.evaluation_sampling(padded, 19, ids),
        "mended": sampling.evaluation_sampling(DataLoader(mine, 4), 19, ids),
    }


# Replicas that diverge.


def seeds():
    rank = dist.get_rank()
    return {
        "broken": replicas.same_weights(small_model(seed=rank)),
        "mended": replicas.same_weights(DistributedDataParallel(small_model(seed=rank))),
    }


def drifting_buffer():
    """Buffers differ without broadcast_buffers; with it, which is DDP's default, that is no fault."""
    torch.manual_seed(dist.get_rank())
    kept = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sent = DistributedDataParallel(copy.deepcopy(kept))
    for net in (kept, sent):
        net(torch.randn(8, 2))
    return {"broken": replicas.same_buffers(kept), "mended": replicas.same_buffers(sent)}


def tampered():
    ddp = DistributedDataParallel(small_model())
    loss_of(ddp, ROWS[dist.get_rank() : dist.get_rank() + 4]).backward()
    mended = replicas.same_gradients(ddp)
    if dist.get_rank() == 1:
        next(ddp.parameters()).grad.mul_(1.5)
    return {"broken": replicas.same_gradients(ddp), "mended": mended}


def skipped_backward():
    """Without gradient synchronisation, rank 1 skips a batch."""

    def step(skip):
        model = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.no_sync():
            loss_of(model, ROWS[0:4]).backward()
        if skip and dist.get_rank() == 1:
            optimizer.zero_grad()
        optimizer.step()
        return replicas.same_weights(model)

    return {"broken": step(True), "mended": step(False)}


def probe():
    rank = dist.get_rank()
    broken, mended = small_model(seed=rank), small_model(seed=0)
    batch = tuple(tensor + rank for tensor in ROWS[0:4])
    return {
        "broken": replicas.same_loss(lambda b: loss_of(broken, (b[0], b[1] % 2)), batch),
        "mended": replicas.same_loss(lambda b: loss_of(mended, (b[0], b[1] % 2)), batch),
    }


# Order of arrival.


def late_rank():
    import time

    time.sleep(1.5 * dist.get_rank())
    broken = order.arrival("wrap", limit_seconds=0.3)
    dist.barrier()
    return {"broken": broken, "mended": order.arrival("wrap", limit_seconds=1.4)}


# Accumulation under DDP: an all-reduce for each micro-batch, or none.


def synchronised_too_often():
    def epoch(with_no_sync):
        model = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with accumulation.recording(model) as events:
            for _ in range(2):
                for micro in range(4):
                    batch = ROWS[4 * micro : 4 * micro + 4]
                    if with_no_sync and micro < 3:
                        with model.no_sync():
                            loss_of(model, batch).backward()
                    else:
                        loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return accumulation.accumulation_calls(events, 4)

    return {"broken": epoch(False), "mended": epoch(True)}


def unsummed():
    """`no_sync` on all micro-batches but the first; on all, also with DDP inside a module; DDP's wrapper bypassed."""

    def recorded(is_local, around=False, within=False):
        model = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with accumulation.recording(nn.Sequential(model) if within else model) as events:
            for number in range(8):
                with model.no_sync() if is_local(number % 4) else contextlib.nullcontext():
                    net = model.module if around else model
                    loss_of(net, ROWS[number : number + 2]).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        return accumulation.accumulation_calls(events, 4)

    broken = [recorded(lambda at: at != 0), recorded(lambda at: True)]
    broken.append(recorded(lambda at: False, around=True))
    broken.append(recorded(lambda at: True, within=True))
    assert len({finding.measured for finding in broken}) == 1, broken
    return {"broken": broken[0], "mended": recorded(lambda at: at != 3)}


# FSDP: a resume that loads the model's own fresh state instead of the file's.


class Sharded:
    """A sharded model, saved and loaded as torch's distributed checkpoints."""

    def __init__(self, loads):
        from torch.distributed.fsdp import fully_shard

        self.loads, self.number = loads, 0
        self.model = small_model()
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def step(self):
        batch = ROWS[self.number : self.number + 4]
        self.number += 1
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.number

    def save(self, folder):
        from torch.distributed import checkpoint

        checkpoint.save({"model": self.model.state_dict()}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            (folder / "state.json").write_text(
                json.dumps([self.number, torch.get_rng_state().tolist()])
            )
        dist.barrier()

    def load(self, folder):
        from torch.distributed import checkpoint

        if self.loads == "the file's":
            state = {"model": self.model.state_dict()}
            checkpoint.load(state, checkpoint_id=folder)
        else:  # made after the load, so never filled
            checkpoint.load({"model": copy.deepcopy(self.model.state_dict())}, checkpoint_id=folder)
            state = {"model": self.model.state_dict()}
        self.model.load_state_dict(state["model"])
        self.number, rng = json.loads((folder / "state.json").read_text())
        torch.set_rng_state(torch.tensor(rng, dtype=torch.uint8))
        import random

        import numpy as np

        random.seed(0), np.random.seed(0)


def fresh_state():
    import random

    import numpy as np

    def judged(loads):
        random.seed(0), np.random.seed(0)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        return resume.resume(lambda: Sharded(loads), Path(folder[0]))

    broken = {finding.check: finding for finding in judged("its own")}
    mended = judged("the file's")
    return {"broken": broken["resume: model"], **{f.check: f for f in mended}}


# One against many: the mean of the ranks' means.


def means_of_means():
    def updates(weigh):
        model = DistributedDataParallel(small_model())
        alone = small_model()
        ours, one = [], []
        for start in (0, 8):
            whole = ROWS[start : start + 5]
            share = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
            mine = tuple(tensor[share] for tensor in whole)
            loss = loss_of(model, mine) * (len(mine[0]) * 2 / 5 if weigh else 1.0)
            for net, value, seen in ((model, loss, ours), (alone, loss_of(alone, whole), one)):
                net.zero_grad()
                value.backward()
                norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
                total = sum(gather(float(value))) / 2 if net is model else float(value)
                seen.append((total, float(norm)))
                torch.optim.SGD(net.parameters(), 0.1).step()
        return curve.same_curve(ours, one)

    return {"broken": updates(weigh=False), "mended": updates(weigh=True)}


# Healthy programs that the doctor once condemned.


def adversarial():
    """As in DCGAN, the judge is updated between the generator's forward and backward pass."""
    made, judge = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    theirs, its = (torch.optim.SGD(each.parameters(), 0.1) for each in (made, judge))
    with accumulation.recording(made) as events:
        for start in (0, 4, 8):
            inputs, labels = ROWS[start : start + 4]
            fake = made(inputs)
            its.zero_grad()
            loss_of(judge, (fake.detach(), labels)).backward()
            its.step()
            theirs.zero_grad()
            loss_of(judge, (fake, labels)).backward()
            theirs.step()
    return {"unsummed": events.count("unsummed"), "reduce": events.count("reduce")}


def summed_by_hand():
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with accumulation.recording(model) as events:
        for start in (0, 4, 8):
            with model.no_sync():
                loss_of(model, ROWS[start : start + 4]).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
    return {"unsummed": events.count("unsummed")}


def healthy():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.fsdp import fully_shard

    sampler = DistributedSampler(ROWS, shuffle=True)
    dropping = DataLoader(ROWS, 3, sampler=sampler, drop_last=True)
    odd = torch.utils.data.Subset(ROWS, range(19))
    evened = DistributedSampler(odd, shuffle=True)
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2))
    net(images)
    sharded = small_model()
    fully_shard(sharded)
    weights = torch.tensor([1.0] * 15 + [3.0] * 5)
    own = torch.Generator().manual_seed(dist.get_rank())
    weighted = torch.utils.data.WeightedRandomSampler(weights, 10, generator=own)
    mine = torch.utils.data.Subset(ROWS, range(dist.get_rank(), 19, 2))
    everywhere = DataLoader(mine, 4)

    def gathered(batch):
        ranks = [None] * 2
        dist.all_gather_object(ranks, ids(batch))
        return [*ranks[0], *ranks[1]]

    model = DistributedDataParallel(small_model())
    counts = []
    for _ in range(2):  # recording leaves DDP's single hook to the program
        with accumulation.recording(model) as events:
            loss_of(model, ROWS[:4]).backward()
        counts.append(events.count("reduce"))
        if len(counts) == 1:
            model.register_comm_hook(None, allreduce_hook)
    return {
        "adversarial": adversarial(),
        "summed by hand": summed_by_hand(),
        "drop_last": sampling.training_sampling(dropping, 20, ids, sampler.set_epoch),
        "made even": sampling.training_sampling(
            DataLoader(odd, 4, sampler=evened), 19, ids, evened.set_epoch
        ),
        "by weight": sampling.training_sampling(DataLoader(ROWS, 2, sampler=weighted), 20, ids),
        "gathered": sampling.evaluation_sampling(everywhere, 19, gathered),
        "channels_last": strides.gradient_strides(net, lambda: net(images).square().mean()),
        "sharded": replicas.same_weights(sharded),
        "reduces": counts,
    }


CASES = [
    healthy,
    strided, same_data, no_set_epoch, epoch_of_one_rank, uneven_loaders, padded_evaluation, seeds, drifting_buffer, tampered, skipped_backward, probe,
    late_rank, synchronised_too_often, unsummed, fresh_state, means_of_means,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    dist.init_process_group("gloo")
    results = {}
    for case in CASES:
        outcome = case()
        results[case.__name__] = {
            key: vars(value) if isinstance(value, Finding) else value
            for key, value in outcome.items()
        }
        dist.barrier()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
    os._exit(0)  # at exit a gloo thread sometimes aborts (PyTorch issue 190489)
