"""The trained model: one process per Megatron rank."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from omegaconf import DictConfig

from recipes.megatron_tiny.model import build_model
from verl_profiling import stage
from verl_profiling.workers import CaptureTimers, MegatronCaptureMixin


class MegatronWorker(MegatronCaptureMixin):
    """One rank. The mixin adds what the profiling callback calls."""

    def __init__(self, config: DictConfig, rank: int, init_method: str) -> None:
        self.config = config
        tp, pp = config.parallel.tp, config.parallel.pp
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=tp * pp)
        parallel_state.initialize_model_parallel(tp, pp)
        self.init_capture(config.profiling, role="actor")
        torch.manual_seed(config.seed)
        self.model = build_model(config)
        self.model.config.timers = CaptureTimers(self.model.config.timers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr)

    @stage("old_log_prob")
    def old_log_prob(self, tokens: torch.Tensor) -> None:
        """Run the model forward, micro-batch by micro-batch."""
        with torch.no_grad():
            for micro_batch in tokens:
                self._forward(micro_batch)

    @stage("update_actor")
    def update_actor(self, tokens: torch.Tensor) -> float:
        """Train on all micro-batches; return the mean loss (0 on all
        but the last pipeline stage).
        """
        passes = [self._forward(micro_batch) for micro_batch in tokens]
        for received, output in passes:
            self._backward(received, output)
            self.capture.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not parallel_state.is_pipeline_last_stage():
            return 0.0
        return sum(output.item() for _, output in passes) / len(passes)

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run one micro-batch through this pipeline stage; return its input and output.

        Megatron's own schedules need a GPU; this one uses the same process groups and timers.
        """
        timers = self.model.config.timers
        received = None
        if not parallel_state.is_pipeline_first_stage():
            timers("forward-recv", log_level=2).start()
            size, length = tokens.shape[0], tokens.shape[1] - 1
            received = torch.empty(length, size, self.config.model.hidden_size)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            timers("forward-recv").stop()
            received.requires_grad_()
            self.model.set_input_tensor(received)
        timers("forward-compute", log_level=2).start()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        output = self.model(
            input_ids=inputs, position_ids=positions, attention_mask=None, labels=labels
        )
        if parallel_state.is_pipeline_last_stage():
            output = output.mean()
        timers("forward-compute").stop()
        if not parallel_state.is_pipeline_last_stage():
            timers("forward-send", log_level=2).start()
            dist.send(
                output.detach().contiguous(), parallel_state.get_pipeline_model_parallel_next_rank()
            )
            timers("forward-send").stop()
        return received, output

    def _backward(self, received: torch.Tensor | None, output: torch.Tensor) -> None:
        timers = self.model.config.timers
        gradient = None
        if not parallel_state.is_pipeline_last_stage():
            timers("backward-recv", log_level=2).start()
            gradient = torch.empty_like(output)
            dist.recv(gradient, parallel_state.get_pipeline_model_parallel_next_rank())
            timers("backward-recv").stop()
        timers("backward-compute", log_level=2).start()
        output.backward(gradient)
        timers("backward-compute").stop()
        if received is not None:
            timers("backward-send", log_level=2).start()
            dist.send(received.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
            timers("backward-send").stop()
