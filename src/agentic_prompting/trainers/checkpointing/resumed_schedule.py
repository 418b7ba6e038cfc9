"""The learning rate of a resumed run, where its schedule is not that of the checkpoint."""

from __future__ import annotations

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def follow_present_schedule(scheduler: LRScheduler | AcceleratedScheduler) -> bool:
    """Give the optimizer the rate that a resumed schedule has at its present step.

    A checkpoint restores the rate that its own schedule had, and the present one sets its rate only
    after the first step. A run that was finished, and is resumed with more steps, would take that
    step at the rate 0 with which a linear schedule ends. Schedules that are no function of the
    step, such as DeepSpeed's own, are left alone.

    Args:
        scheduler (`LRScheduler` or `AcceleratedScheduler`): A scheduler whose state was loaded.

    Returns:
        `bool`: Whether the present schedule has another rate here than the checkpoint's.
    """
    while isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    if not isinstance(scheduler, LambdaLR):
        return False

    # The loaded state has the rates of the checkpoint's schedule; without a change they are equal.
    saved_rates = [float(rate) for rate in scheduler.get_last_lr()]
    rates = [
        float(base_rate * get_factor(scheduler.last_epoch))
        for base_rate, get_factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    if rates == saved_rates:
        return False

    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = list(rates)
    return True
