"""Metrics of an engine under vLLM's names: for `LLM.get_metrics()`, for a server's /metrics, and for the log line.

It has the metrics' names and help texts, and computes rates. `stats.py` does the counting.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxengine.engine.stats.metric_types import Counter, Gauge, Histogram, Metric, Vector
from jaxengine.engine.stats.server_stats import ServerStats

if TYPE_CHECKING:
    # API processes read the help texts, without jax.
    from jaxengine.engine.engine import Engine

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0

HELP = {
    "vllm:prompt_tokens": "Tokens of completed prompts, including those found in the prefix cache.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:num_preemptions": "Times that a request lost its pages to others and had to be resumed later.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found in the prefix cache.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:corrupted_requests": "Requests that ended because their logits were not finite.",
    "vllm:admission_rejections": "Requests that were refused because too many were waiting.",
    "vllm:num_requests_running": "Running requests.",
    "vllm:num_requests_waiting": "Waiting requests.",
    "vllm:num_requests_waiting_by_reason": "Waiting requests: for pages and slots, or for work that is under way.",
    "vllm:kv_cache_usage_perc": "Share of the KV pages that are in use, 0 to 1.",
    "vllm:avg_prompt_throughput_toks_per_s": "Prompt tokens per second over the last ten seconds.",
    "vllm:avg_generation_throughput_toks_per_s": "Generated tokens per second over the last ten seconds.",
    "vllm:lora_requests_info": "Adapters of running and of waiting requests, and their limit; the value is the time.",
    "vllm:cache_config_info": "Configuration of the KV pages, in labels; the value is 1.",
    "vllm:time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Time between two successive tokens of a request.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "vllm:e2e_request_latency_seconds": "Time from a request's arrival to its end.",
    "vllm:request_queue_time_seconds": "Time from when the engine got a request until it first ran.",
    "vllm:request_prefill_time_seconds": "Time from when a request first ran to its first token.",
    "vllm:request_decode_time_seconds": "Time from a request's first token to its last.",
    "vllm:request_inference_time_seconds": "Time from when a request first ran to its last token.",
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Tokens generated for a request.",
    "vllm:request_max_num_generation_tokens": "Tokens generated for the longest of the n outputs of one call.",
    "vllm:request_params_max_tokens": "Limit of a request's output tokens, which max_model_len may lower.",
    "vllm:request_params_n": "Number of outputs that a request asked for.",
    "vllm:iteration_tokens_total": "Tokens of a step.",
    "vllm:spec_decode_num_drafts": "Times that drafts of a request were verified.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Draft tokens that were accepted, by their position in the draft.",
    "jaxengine:forced_tokens": "Tokens that steps got without sampling, because a grammar allowed nothing else.",
    "vllm:mm_cache_queries": "Images and videos looked up in the cache of preprocessed ones.",
    "vllm:mm_cache_hits": "Images and videos found in the cache of preprocessed ones.",
    "jaxengine:mm_ipc_bytes": "Bytes of pixels that API processes sent, by transport.",
    "jaxengine:encoder_cache_queries": "Images and videos whose embeddings a step needed.",
    "jaxengine:encoder_cache_hits": "Images and videos whose embeddings were in the cache when a step needed them.",
    "jaxengine:encoder_calls": "Calls of the vision encoder.",
    "jaxengine:encoder_items": "Images and videos encoded.",
    "jaxengine:encoder_patches": "Patches of images and videos encoded.",
    "jaxengine:encoder_host_seconds": "Host time to batch images and to call their encoder.",
    "jaxengine:encoder_cache_embeddings": "Capacity of the cache of image embeddings.",
    "jaxengine:encoder_cache_embeddings_kept": "Image embeddings that are in the cache.",
    "jaxengine:encoder_cache_embeddings_used": "Image embeddings that running requests need.",
    "jaxengine:request_preprocessing_time_seconds": "Time from a request's arrival until the engine got it, tokenised.",
    "jaxengine:compilations_since_ready": "Programs that XLA compiled while the engine was serving; 0 is expected.",
    "jaxengine:executables_compiled": "Programs that were compiled at start-up.",
    "jaxengine:executables_loaded": "Programs that were loaded from the cache at start-up.",
    "jaxengine:steps": "Steps of the engine.",
    "jaxengine:scheduled_tokens": "Tokens that steps computed.",
    "vllm:estimated_flops_per_gpu": "Operations of a device, as estimated from the model's shape.",
    "vllm:estimated_read_bytes_per_gpu": "Bytes that a device read from its memory, as estimated likewise.",
    "vllm:estimated_write_bytes_per_gpu": "Bytes that a device wrote to its memory, as estimated likewise.",
    "jaxengine:padding_tokens": "Padding tokens that filled steps up to a compiled shape.",
    "jaxengine:bucket_steps": "Steps, by compiled shape.",
    "jaxengine:bucket_tokens": "Tokens that steps computed, by compiled shape.",
    "jaxengine:bucket_padding_tokens": "Padding tokens of steps, by compiled shape.",
    "jaxengine:step_host_seconds": "Host time for steps, by part; `wait` is the time spent waiting for the device.",
    "jaxengine:device_idle_seconds": "Time the device was idle while requests were unfinished; a lower bound.",
    "vllm:engine_sleep_state": "1 for the engine's current state: awake, weights_offloaded or discard_all.",
    "jaxengine:idle_sleeps": "Times that the engine went to sleep because no request came.",
    "jaxengine:idle_wake_seconds": "Time that it took to wake up for requests.",
    "jaxengine:masks": "Masks computed for structured outputs, without each grammar's first one.",
    "jaxengine:mask_seconds": "Time to compute masks, without the compilation of grammars.",
    "jaxengine:page_slots_used": "Token slots in use in the pages that running requests hold, summed over steps.",
    "jaxengine:page_slots_empty": "Empty token slots in the pages that running requests hold, summed over steps.",
    "jaxengine:num_pages": "KV pages.",
    "vllm:kv_offload_load_bytes": "Bytes of KV pages and states brought back to the devices.",
    "vllm:kv_offload_load_time": "Seconds that requests waited for pages to be brought back, summed over requests.",
    "vllm:kv_offload_load_size": "Bytes of KV pages and states that one transfer brought back to the devices.",
    "vllm:kv_offload_store_bytes": "Bytes of KV pages and states copied from the devices.",
    "vllm:kv_offload_store_time": "Seconds from the dispatch of such copies until host memory had them, summed.",
    "vllm:kv_offload_store_size": "Bytes of KV pages and states that one transfer copied from the devices.",
    "vllm:kv_offload_cpu_cache_usage_perc": "Share of the host memory for KV pages that is in use, 0 to 1.",
    "vllm:external_prefix_cache_queries": "Tokens that were not in the pool and were looked up outside of the devices.",
    "vllm:external_prefix_cache_hits": "Tokens that were found outside of the devices and so not computed.",
    "jaxengine:kv_sessions": "Conversations whose pages are kept in host memory.",
    "jaxengine:kv_session_pages": "KV pages and states that conversations keep in host memory.",
    "vllm:kv_block_lifetime_seconds": "Time from when a page entered the prefix cache until it was evicted.",
    "vllm:kv_block_idle_before_evict_seconds": "Time from a page's last use until it was evicted.",
    "vllm:kv_block_reuse_gap_seconds": "Time between successive uses, among the last four, of an evicted page.",
    "jaxengine:kv_event_batches": "Batches of KV events that were published.",
    "jaxengine:kv_transfer_leases": "Requests whose pages are kept for other engines.",
    "jaxengine:kv_transfer_leased_pages": "KV pages and states that are kept for other engines.",
    "jaxengine:kv_transfer_received_pages": "KV pages and states that came from other engines.",
    "jaxengine:kv_transfer_failed_sources": "Requests whose pages another engine did not send in time.",
    "jaxengine:kv_transfer_refused_leases": "Requests whose pages could not be kept because host memory was full.",
    "jaxengine:kv_offload_load_pages": "KV pages and states brought back to the devices.",
    "jaxengine:kv_offload_store_pages": "KV pages and states copied from the devices.",
    "jaxengine:kv_offload_dropped_pages": "KV pages and states not copied because too many copies were in flight.",
    "jaxengine:kv_offload_disk_bytes": "Bytes of the files of KV pages that this engine has listed.",
    "jaxengine:kv_offload_disk_bad_files": "Damaged files of KV pages, which were removed.",
    "jaxengine:kv_offload_disk_failed_writes": "KV pages that could not be written to the folder.",
    "vllm:prompt_tokens_cached": "Prompt tokens that were found in the prefix cache at a request's first admission.",
    "vllm:prompt_tokens_cached_by_source": "Prompt tokens that were found in the pool, or brought into it.",
    "vllm:prompt_tokens_by_source": "Prompt tokens that were computed, found in the pool, or brought into it.",
    "vllm:rl_weight_update_operation_duration_seconds": "Time to read new weights and to switch to them.",
    "vllm:sleep_mode_operation_duration_seconds": "Time to go to sleep, and to wake up.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not found in the prefix cache.",
    "vllm:request_num_preemptions": "Times that a request was preempted.",
    "vllm:tool_call_parser_invocations": "Outputs that were searched for tool calls; a streamed output counts once.",
    "http_requests": "HTTP requests, by method, route and class of statuses.",
    "jaxengine:http_responses": "HTTP requests, by method, route and status.",
    "http_request_duration_seconds": "Time from a request's arrival to the end of its answer, also of a stream.",
    "jaxengine:engine_restarts": "Times that the server has restarted its engine.",
    "process_cpu_seconds": "CPU time of a process of the server, user and system.",
    "process_start_time_seconds": "When a process of the server was started, in seconds since 1970.",
    "process_resident_memory_bytes": "Resident memory of a process of the server.",
    "process_open_fds": "Open files and sockets of a process of the server.",
    "jaxengine:num_preemptions_by_mode": "Preemptions, by how the request gets its pages back: recompute or swap.",
}
# Counters that every engine has, with the value 0 if no extension counts them.
ALWAYS = ("jaxengine:masks", "jaxengine:mask_seconds", "vllm:mm_cache_queries", "vllm:mm_cache_hits")


class Metrics:
    """Metrics of one engine, computed from its counts.

    Attributes:
      server: counts that the processes of a server report.
    """

    def __init__(self, engine: Engine, *, log_stats: bool):
        """Start rates from the engine's current counts. log_stats: whether `stepped` logs a line of statistics."""
        self._engine = engine
        self._log_stats = log_stats
        # Sample at which the log line's interval begins. Time without requests is added to its time.
        self._logged = self._now()
        self._stepped = self._logged[0]
        # Samples of `_now`, at least a second apart, except for the latest step's and the last ones before times
        # without requests. Twice as many as seconds, so that they cover the interval nevertheless.
        most = 2 * int(LOG_INTERVAL_SECONDS) + 2
        self._samples: deque[tuple[float, int, int]] = deque([self._logged] * 2, maxlen=most)
        self.server = ServerStats()

    def collect(self) -> list[Metric | Vector | Histogram]:
        """Return all metrics with their current values: those of the engine, its server and its extensions, and those
        of ALWAYS, which are 0 if no extension counts them.
        """
        found = [*self._counters(), *self._gauges(), *self._histograms(), *self.server.metrics()]
        found += [metric for each in self._engine.extensions.by_name.values() for metric in each.metrics()]
        names = {metric.name for metric in found}
        return found + [Counter(name, 0) for name in ALWAYS if name not in names]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all metrics as dicts of JSON values: their fields, and `kind`, which is "counter", "gauge" or
        "histogram".
        """
        plain: list[Metric | Histogram] = []
        for each in self.collect():
            plain += each.counters() if isinstance(each, Vector) else [each]
        return [{"kind": type(each).__name__.lower(), **dataclasses.asdict(each)} for each in plain]

    def throughput(self) -> tuple[float, float]:
        """Return prompt tokens per second and generated tokens per second, over the last ten seconds."""
        now, prompt, generated = self._now()
        start = now - LOG_INTERVAL_SECONDS
        before = after = self._samples[0]
        for after in self._samples:
            if after[0] > start:
                break
            before = after
        # The sample before the interval is a step's, and a step may be long: its tokens count with all of its time. But
        # if no tokens came from then until the next sample, there were no requests.
        begin = max(before[0], start) if after[1:] == before[1:] else before[0]
        seconds = max(now - begin, 1e-3)
        return (prompt - before[1]) / seconds, (generated - before[2]) / seconds

    def stepped(self) -> None:
        """Record a sample of the token counts, for rates. With log_stats, log vLLM's line of statistics once every ten
        seconds in which there are requests. Must be called after each step.
        """
        sample, samples = self._now(), self._samples
        if (busy_since := self._engine.busy_since) > self._stepped:
            then, *counts = self._logged
            self._logged = (then + busy_since - self._stepped, *counts)
            if busy_since - samples[-1][0] >= 1.0:
                samples.append((busy_since, *samples[-1][1:]))
        self._stepped = sample[0]
        if samples[-1][0] - samples[-2][0] < 1.0:
            samples[-1] = sample
        else:
            samples.append(sample)
        if self._log_stats and sample[0] - self._logged[0] >= LOG_INTERVAL_SECONDS:
            self._log(*sample)

    def _now(self) -> tuple[float, int, int]:
        """Return time.monotonic seconds, and the prompt and generated tokens counted so far."""
        engine = self._engine
        return time.monotonic(), engine.request_stats.num_prompt_tokens, engine.stats.num_generated_tokens

    def _log(self, now: float, prompt: int, generated: int) -> None:
        """Log vLLM's line of statistics, with rates since the last line, and begin the next interval. The arguments are
        a sample of `_now`.
        """
        then, prompt_before, generated_before = self._logged
        scheduler = self._engine.scheduler
        queries = scheduler.num_prefix_queries
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, compilations since ready: %d",
            (prompt - prompt_before) / (now - then),
            (generated - generated_before) / (now - then),
            scheduler.num_running,
            scheduler.num_waiting,
            100 * scheduler.page_usage,
            100 * scheduler.num_prefix_hits / queries if queries else 0.0,
            self._engine.runner.compiles.count,
        )
        self._logged = (now, prompt, generated)

    def _counters(self) -> Iterator[Counter]:
        """Yield the counters of requests, and of the engine loop, its scheduler, its runner and each bucket."""
        engine, runner, counts = self._engine, self._engine.runner, self._engine.stats
        scheduler = engine.scheduler
        requests = engine.request_stats
        for name, value in {
            "vllm:prompt_tokens": requests.num_prompt_tokens,
            "vllm:prompt_tokens_cached": requests.num_cached_tokens,
            "vllm:generation_tokens": counts.num_generated_tokens,
            "vllm:num_preemptions": scheduler.num_preemptions,
            "vllm:prefix_cache_queries": scheduler.num_prefix_queries,
            "vllm:prefix_cache_hits": scheduler.num_prefix_hits,
            "vllm:corrupted_requests": requests.num_corrupted,
            "vllm:admission_rejections": requests.num_rejections,
            "jaxengine:compilations_since_ready": runner.compiles.count,
            "jaxengine:executables_compiled": runner.num_compiled,
            "jaxengine:executables_loaded": runner.num_loaded,
            "jaxengine:steps": counts.num_steps,
            "jaxengine:scheduled_tokens": counts.num_tokens,
            "jaxengine:padding_tokens": counts.num_padding_tokens,
            "jaxengine:device_idle_seconds": counts.idle_seconds,
            "jaxengine:page_slots_used": counts.page_slots_used,
            "jaxengine:page_slots_empty": counts.page_slots_empty,
        }.items():
            yield Counter(name, value)
        external = requests.num_external_tokens
        local = requests.num_cached_tokens - external
        for name, counted in {
            "vllm:prompt_tokens_by_source": {
                "local_compute": requests.num_prompt_tokens - requests.num_cached_tokens,
                "local_cache_hit": local,
                "external_kv_transfer": external,
            },
            "vllm:prompt_tokens_cached_by_source": {"device": local, "external_unspecified": external},
        }.items():
            for source, count in counted.items():
                yield Counter(name, count, {"source": source})
        for reason, count in requests.finished.items():
            yield Counter("vllm:request_success", count, {"finished_reason": reason.value})
        for part in ("schedule", "dispatch", "wait", "update"):
            yield Counter("jaxengine:step_host_seconds", getattr(counts, f"{part}_seconds"), {"part": part})
        for bucket, use in counts.buckets.items():
            labels = {"bucket": str(bucket)}
            yield Counter("jaxengine:bucket_steps", use.num_steps, labels)
            yield Counter("jaxengine:bucket_tokens", use.num_tokens, labels)
            yield Counter("jaxengine:bucket_padding_tokens", use.num_padding_tokens, labels)

    def _gauges(self) -> Iterator[Gauge]:
        """Yield the gauges of the scheduler: requests, pages, token rates, and the configuration of the KV pages."""
        scheduler, config = self._engine.scheduler, self._engine.runner.config
        prompt_rate, generation_rate = self.throughput()
        deferred = scheduler.num_deferred
        for name, value in {
            "vllm:num_requests_running": scheduler.num_running,
            "vllm:num_requests_waiting": scheduler.num_waiting,
            "vllm:kv_cache_usage_perc": scheduler.page_usage,
            "vllm:avg_prompt_throughput_toks_per_s": prompt_rate,
            "vllm:avg_generation_throughput_toks_per_s": generation_rate,
            "jaxengine:num_pages": scheduler.num_pages,
        }.items():
            yield Gauge(name, value)
        for reason, count in (("capacity", scheduler.num_waiting - deferred), ("deferred", deferred)):
            yield Gauge("vllm:num_requests_waiting_by_reason", count, {"reason": reason})
        plan = self._engine.runner.plan
        info = {
            "block_size": config.block_size,
            "num_gpu_blocks": scheduler.num_pages,
            "kv_cache_size_tokens": scheduler.num_pages * plan.max_model_len // plan.pages_per_seq,
            "kv_cache_max_concurrency": scheduler.num_pages / plan.pages_per_seq,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        yield Gauge("vllm:cache_config_info", 1, {name: str(value) for name, value in info.items()})

    def _histograms(self) -> Iterator[Histogram]:
        """Yield the histograms of requests' times and tokens, and of the tokens of a step."""
        requests = self._engine.request_stats
        for name, histogram in {
            "vllm:time_to_first_token_seconds": requests.first_token,
            "vllm:inter_token_latency_seconds": requests.intervals,
            "vllm:request_time_per_output_token_seconds": requests.time_per_output_token,
            "vllm:e2e_request_latency_seconds": requests.e2e,
            "vllm:request_queue_time_seconds": requests.queue,
            "vllm:request_prefill_time_seconds": requests.prefill,
            "vllm:request_decode_time_seconds": requests.decode,
            "vllm:request_inference_time_seconds": requests.inference,
            "vllm:request_prompt_tokens": requests.prompt_tokens,
            "vllm:request_generation_tokens": requests.generation_tokens,
            "vllm:request_max_num_generation_tokens": requests.most_generated,
            "vllm:request_prefill_kv_computed_tokens": requests.computed_tokens,
            "vllm:request_num_preemptions": requests.preemptions,
            "vllm:request_params_max_tokens": requests.max_tokens,
            "vllm:request_params_n": requests.n,
            "vllm:iteration_tokens_total": requests.step_tokens,
            "jaxengine:request_preprocessing_time_seconds": requests.preprocessing,
        }.items():
            yield histogram.metric(name)
