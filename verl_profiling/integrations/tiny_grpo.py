"""A tiny GRPO loop: ``verl-profiling demo`` runs it in one process, the recipes on Ray.

The task is to count down from a number to zero, then to stop. A token is a number, so there is no
tokenizer, and nothing is downloaded.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from verl_profiling.capture.session import stage
from verl_profiling.controller.callback import ProfilingCallback
from verl_profiling.workers import CaptureMixin, RequestLog, RolloutCaptureMixin

NUMBERS = 8  # the numbers that are tokens: 0 to 7
END = NUMBERS  # the token that ends a response
RESPONSE_LENGTH = NUMBERS

Rows = list[list[int]]
"""Tokens of prompts or responses."""
Batch = dict[str, torch.Tensor]


def sample_prompts(count: int, rng: random.Random) -> Rows:
    """Return prompts of one number each, e.g. ``[[3], [7]]``."""
    return [[rng.randrange(1, NUMBERS)] for _ in range(count)]


def reward(prompt: list[int], response: list[int]) -> float:
    """Return half a point times the share of correct tokens,
    plus half a point for the exact answer.
    """
    start = prompt[-1]
    answer = [*range(start - 1, -1, -1), END]
    follows = sum(
        token == (previous - 1 if previous else END)
        for previous, token in zip([start, *response], response, strict=False)
    )
    return 0.5 * follows / max(len(answer), len(response)) + 0.5 * (response == answer)


def until_end(response: list[int]) -> list[int]:
    """Return a response up to its first ``END``."""
    return response[: response.index(END) + 1] if END in response else response


def collate(prompts: Rows, responses: Rows) -> Batch:
    """Return the batch: prompts with padded responses, and the mask of the response tokens."""
    rows = [torch.tensor(response) for response in responses]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    mask = (padded == END).cumsum(1) <= 1  # after the first END is padding
    return {"tokens": torch.cat([torch.tensor(prompts), padded], 1), "mask": mask.float()}


def tiny_policy() -> Any:
    """Return a policy with random weights: the next token depends on the last one alone."""
    return nn.Sequential(
        nn.Embedding(NUMBERS + 1, 64), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, NUMBERS + 1)
    )


class PolicyWorker(CaptureMixin):
    """A training rank; in the demo, the only one.

    Attributes:
        policy: Returns the logits of each next token.
        optimizer: The optimizer of the policy's weights.
        mini_batches: Number of mini-batches into which a step's batch is split.
    """

    mini_batches = 2

    def __init__(self, profiling: Any) -> None:
        self.init_capture(profiling, role="actor")
        with stage("weights"):
            self.policy = tiny_policy()
            self.optimizer = torch.optim.AdamW(self.policy.parameters())

    @stage("old_log_prob")
    def old_log_prob(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each response token under the weights as they are."""
        with torch.no_grad():
            return self._log_prob(batch)

    @stage("update_actor")
    def update_actor(self, batch: Batch) -> None:
        """Train on this rank's share of the batch, one mini-batch after the other."""
        for rows in torch.randperm(len(batch["tokens"])).chunk(self.mini_batches):
            with stage("mini_batch"):
                self._policy_loss({name: tensor[rows] for name, tensor in batch.items()}).backward()
                nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], max_norm=1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.capture.step()

    @stage("update_weights")
    def gather_weights(self) -> Any:
        """Return the state dict of the policy."""
        return self.policy.state_dict()

    def _log_prob(self, batch: Batch) -> torch.Tensor:
        tokens = batch["tokens"]
        logits = self.policy(tokens)[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def _policy_loss(self, batch: Batch) -> torch.Tensor:
        ratio = (self._log_prob(batch) - batch["old_log_prob"]).exp()
        advantage = batch["advantage"][:, None]
        clipped = ratio.clamp(0.8, 1.2)  # the range of PPO's paper
        per_token = -torch.minimum(ratio * advantage, clipped * advantage) * batch["mask"]
        return (per_token.sum(1) / batch["mask"].sum(1)).mean()


class PolicyServer(RolloutCaptureMixin):
    """The only rollout replica of the demo."""

    def __init__(self, profiling: Any) -> None:
        self.policy = tiny_policy()
        self.requests = RequestLog()
        self.init_capture(profiling, requests=self.requests)

    @stage("rollout")
    def generate(self, prompts: Rows) -> Rows:
        """Return a sampled response to each prompt."""
        with self.requests.open() as batch, torch.no_grad():
            tokens = torch.tensor(prompts)
            for _ in range(RESPONSE_LENGTH):
                chosen = torch.multinomial(self.policy(tokens)[:, -1].softmax(-1), 1)
                tokens = torch.cat([tokens, chosen], 1)
            responses = [until_end(row) for row in tokens[:, 1:].tolist()]
            for response in responses:
                batch.close(1, len(response))
        return responses

    @stage("update_weights")
    def load_weights(self, weights: Batch) -> None:
        """Load a state dict into the policy."""
        self.policy.load_state_dict(weights)


class GRPOLoop:
    """The loop, on the controller; a subclass calls workers of other processes.

    Args:
        profiling: The settings of the profiler.
        actors: The training ranks.
        servers: The rollout replicas.

    Attributes:
        prompts: Number of prompts in a step.
        group_size: Number of responses to each prompt.
        rng: Source of the random numbers by which prompts are drawn.
    """

    prompts = 32
    group_size = 8

    def __init__(self, profiling: Any, actors: list[Any], servers: list[Any]) -> None:
        self.actors = actors
        self.servers = servers
        self.rng = random.Random(0)
        self.profiling = ProfilingCallback(profiling)
        self.profiling.add_workers("actor", actors)
        self.profiling.add_rollout(servers)

    def train(self, steps: int) -> None:
        """Train, and print the reward of each step."""
        with self.profiling:
            for step in range(1, steps + 1):
                self.profiling.on_step_begin(step, policy_version=step - 1)
                metrics = self.step(step)
                self.profiling.on_step_end(metrics)
                print(f"step {step:3d}  reward {metrics['reward']:.2f}")

    def step(self, step: int) -> dict[str, float]:
        """Roll out, score, and train on one batch; return the step's metrics."""
        drawn = sample_prompts(self.prompts, self.rng)
        prompts = [prompt for prompt in drawn for _ in range(self.group_size)]
        self.profiling.on_rollout_begin()
        responses = self.generate(prompts)
        self.profiling.on_rollout_end()
        with self.profiling.stage("reward"):
            rewards = torch.tensor(list(map(reward, prompts, responses)))
        self.update(collate(prompts, responses), rewards)
        solved = (rewards == 1).float().mean().item()
        return {"reward": rewards.mean().item(), "solved": solved}

    def update(self, batch: Batch, rewards: torch.Tensor) -> None:
        """Train on a batch, and give the replicas the new weights."""
        with self.profiling.stage("old_log_prob"):
            batch["old_log_prob"] = torch.cat(self.on_all_ranks("old_log_prob", batch))
        with self.profiling.stage("advantage"):
            groups = rewards.view(-1, self.group_size)
            spread = groups.std(1, keepdim=True) + 1e-4
            batch["advantage"] = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()
        with self.profiling.stage("update_actor"):
            self.on_all_ranks("update_actor", batch)
        with self.profiling.stage("update_weights"):
            self.update_weights()

    def generate(self, prompts: Rows) -> Any:
        """Return a response to each prompt."""
        return self.servers[0].generate(prompts)

    def on_all_ranks(self, method: str, batch: Batch) -> list[Any]:
        """Call a method of every training rank, each with its share of the batch."""
        return [getattr(self.actors[0], method)(batch)]

    def update_weights(self) -> None:
        """Give the replicas the weights of the first rank."""
        self.servers[0].load_weights(self.actors[0].gather_weights())
