"""GPipe (Huang et al., 2019): all forwards, then all backwards. Holds every activation."""

from __future__ import annotations

from megatron_flex.schedule.policies.policy import Limits, Policy, forward_first

GPIPE = Policy("gpipe", split=False, rank=forward_first, limits=Limits.none, forwards_first=True)
