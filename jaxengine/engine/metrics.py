"""Metrics of an engine under vLLM's names: for `LLM.get_metrics()`, for a server's /metrics, and for the log line.

This module has the names, their help texts, and rates over time. `stats.py` does the counting.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxengine.engine.engine import Engine
from jaxengine.engine.stats.metric_types import Counter, Gauge, Histogram, Metric
from jaxengine.engine.stats.server_stats import ServerStats

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0

HELP = {
    "vllm:prompt_tokens": "Prompt tokens of requests whose prompt is done, those found in the prefix cache included.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:num_preemptions": "Requests that lost their pages to others and were computed again.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found in the prefix cache.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:corrupted_requests": "Requests that ended because their logits were not finite.",
    "vllm:admission_rejections": "Requests that were refused because too many waited.",
    "vllm:num_requests_running": "Requests that run.",
    "vllm:num_requests_waiting": "Requests that wait.",
    "vllm:num_requests_waiting_by_reason": "Requests that wait: for pages and slots, or for a token or mask under way.",
    "vllm:kv_cache_usage_perc": "Share of the KV pages that are referenced, 0 to 1.",
    "vllm:avg_prompt_throughput_toks_per_s": "Prompt tokens a second over the last ten seconds.",
    "vllm:avg_generation_throughput_toks_per_s": "Generated tokens a second over the last ten seconds.",
    "vllm:lora_requests_info": "Adapters that run and wait, and how many may run; the value is the time.",
    "vllm:cache_config_info": "How the KV pages are set up; the value is 1.",
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Between two tokens of a request.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to its end.",
    "vllm:request_queue_time_seconds": "From when the engine got a request until it first ran.",
    "vllm:request_prefill_time_seconds": "From when a request first ran to its first token.",
    "vllm:request_decode_time_seconds": "From a request's first token to its last.",
    "vllm:request_inference_time_seconds": "From when a request first ran to its last token.",
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Tokens generated for a request.",
    "vllm:request_max_num_generation_tokens": "Tokens generated for the longest of the n outputs of one call.",
    "vllm:request_params_max_tokens": "Tokens that a request may have generated, max_model_len considered.",
    "vllm:request_params_n": "Outputs that a request asked for.",
    "vllm:iteration_tokens_total": "Tokens of a step.",
    "vllm:spec_decode_num_drafts": "Times that drafts of a request were verified.",
    "vllm:spec_decode_num_draft_tokens": "Drafts that were verified.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that were accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Drafts that were accepted, by their position in the draft.",
    "jaxengine:forced_tokens": "Tokens given to steps before they were sampled: grammars allowed nothing else.",
    "vllm:mm_cache_queries": "Pictures and videos looked up in the cache of processed ones.",
    "vllm:mm_cache_hits": "Pictures and videos found in the cache of processed ones.",
    "jaxengine:mm_ipc_bytes": "Bytes of pixels that came from API processes, by way.",
    "jaxengine:encoder_cache_queries": "Pictures and videos whose embeddings a step needed.",
    "jaxengine:encoder_cache_hits": "Pictures and videos whose embeddings were in the cache when a step needed them.",
    "jaxengine:encoder_calls": "Calls of the encoder of images.",
    "jaxengine:encoder_items": "Pictures and videos encoded.",
    "jaxengine:encoder_patches": "Patches of images and videos encoded.",
    "jaxengine:encoder_host_seconds": "Time the host spent on putting images together and calling their encoder.",
    "jaxengine:encoder_cache_embeddings": "Embeddings of images that the cache has room for.",
    "jaxengine:encoder_cache_embeddings_kept": "Embeddings of images that the cache has.",
    "jaxengine:encoder_cache_embeddings_used": "Embeddings of images that running requests need.",
    "jaxengine:request_preprocessing_time_seconds": "From a request's arrival until the engine got it, tokenised.",
    "jaxengine:compilations_since_ready": "Programs that XLA compiled while the engine was serving; 0 is expected.",
    "jaxengine:executables_compiled": "Programs that the start-up compiled.",
    "jaxengine:executables_loaded": "Programs that the start-up found compiled.",
    "jaxengine:steps": "Steps of the engine.",
    "jaxengine:scheduled_tokens": "Tokens that steps computed.",
    "jaxengine:padding_tokens": "Tokens by which steps were padded to a compiled shape.",
    "jaxengine:bucket_steps": "Steps, by compiled shape.",
    "jaxengine:bucket_tokens": "Tokens that steps computed, by compiled shape.",
    "jaxengine:bucket_padding_tokens": "Tokens by which steps were padded, by compiled shape.",
    "jaxengine:step_host_seconds": "Time the host spent on steps, by part; wait is for the device.",
    "jaxengine:device_idle_seconds": "Time the device had nothing to do while requests were unfinished; a lower bound.",
    "vllm:engine_sleep_state": "1 for the state of the engine: awake, weights_offloaded or discard_all.",
    "jaxengine:idle_sleeps": "Times that the engine fell asleep because no request came.",
    "jaxengine:idle_wake_seconds": "Time that waking up for requests took.",
    "jaxengine:masks": "Masks computed for structured outputs, first ones aside.",
    "jaxengine:mask_seconds": "Seconds that computing masks took, compilations of grammars aside.",
    "jaxengine:page_slots_used": "Token slots in use of the pages that running requests hold, summed over steps.",
    "jaxengine:page_slots_empty": "Token slots empty of the pages that running requests hold, summed over steps.",
    "jaxengine:num_pages": "KV pages.",
    "vllm:kv_offload_load_bytes": "Bytes of KV pages and states brought back to the devices.",
    "vllm:kv_offload_load_time": "Seconds that requests waited for pages to be brought back, summed over requests.",
    "vllm:kv_offload_load_size": "Bytes of KV pages and states that one transfer brought back to the devices.",
    "vllm:kv_offload_store_bytes": "Bytes of KV pages and states copied from the devices.",
    "vllm:kv_offload_store_time": "Seconds from the dispatch of such copies until host memory had them, summed.",
    "vllm:kv_offload_store_size": "Bytes of KV pages and states that one transfer copied from the devices.",
    "vllm:kv_offload_cpu_cache_usage_perc": "Share of the host memory for KV pages that is in use, 0 to 1.",
    "vllm:external_prefix_cache_queries": "Tokens that the pool lacked and requests looked for outside of the devices.",
    "vllm:external_prefix_cache_hits": "Tokens of these that came back and were not computed.",
    "jaxengine:kv_sessions": "Conversations whose pages are kept in host memory.",
    "jaxengine:kv_session_pages": "KV pages and states that conversations keep in host memory.",
    "vllm:kv_block_lifetime_seconds": "From when a page could be found until it was evicted.",
    "vllm:kv_block_idle_before_evict_seconds": "From when a page was last found until it was evicted.",
    "vllm:kv_block_reuse_gap_seconds": "Between two times that an evicted page was found, of the last four.",
    "jaxengine:kv_event_batches": "Batches of KV events that were published.",
    "jaxengine:kv_transfer_leases": "Requests whose pages are kept for other engines.",
    "jaxengine:kv_transfer_leased_pages": "KV pages and states that are kept for other engines.",
    "jaxengine:kv_transfer_received_pages": "KV pages and states that came from other engines.",
    "jaxengine:kv_transfer_failed_sources": "Requests whose pages another engine did not send in time.",
    "jaxengine:kv_transfer_refused_leases": "Requests whose pages could not be kept for want of host memory.",
    "jaxengine:kv_offload_load_pages": "KV pages and states brought back to the devices.",
    "jaxengine:kv_offload_store_pages": "KV pages and states copied from the devices.",
    "jaxengine:kv_offload_dropped_pages": "KV pages and states not copied because too many copies were on their way.",
    "jaxengine:kv_offload_disk_bytes": "Bytes of the files of KV pages that this engine has listed.",
    "jaxengine:kv_offload_disk_bad_files": "Files of KV pages that were damaged, and removed.",
    "jaxengine:kv_offload_disk_failed_writes": "KV pages that could not be written to the folder.",
    "vllm:prompt_tokens_cached": "Prompt tokens that were found in the prefix cache at a request's first admission.",
    "vllm:prompt_tokens_by_source": "Prompt tokens that were computed, found in the pool, or brought into it.",
    "vllm:rl_weight_update_operation_duration_seconds": "Time to read new weights and to switch to them.",
    "vllm:sleep_mode_operation_duration_seconds": "Time to fall asleep, and to wake up.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not found in the prefix cache.",
    "vllm:request_num_preemptions": "Times that a request was preempted.",
    "vllm:tool_call_parser_invocations": "Outputs in which tool calls were looked for, once each; streams too.",
    "http_requests": "HTTP requests, by method, route and status.",
    "http_request_duration_seconds": "From a request's arrival to the end of its answer, streams included.",
    "jaxengine:engine_restarts": "Times that the server has started its engine again.",
    "process_cpu_seconds": "CPU time of a process of the server, user and system.",
    "process_start_time_seconds": "When a process of the server was started, in seconds since 1970.",
    "process_resident_memory_bytes": "Resident memory of a process of the server.",
    "process_open_fds": "Open files and sockets of a process of the server.",
    "jaxengine:num_preemptions_by_mode": "Preempted requests, by how they get their pages back: recompute or swap.",
}
# Counters that every engine shows, at 0 while no extension counts them.
ALWAYS = ("jaxengine:masks", "jaxengine:mask_seconds", "vllm:mm_cache_queries", "vllm:mm_cache_hits")


class Metrics:
    """Metrics of one engine, computed from its counts.

    Attributes:
      server: counts that the processes of a server report.
    """

    def __init__(self, engine: Engine, *, log_stats: bool):
        """Begin the rates at the engine's current counts. log_stats: whether `stepped` logs a line of statistics."""
        self._engine = engine
        self._log_stats = log_stats
        now = time.monotonic()
        # Sample at which the log line's interval begins; time without requests is added to its time.
        self._logged = self._now()
        self._stepped = now
        # Samples of `_now`, at least a second apart but for the last, which is of the latest step.
        self._samples: deque[tuple[float, int, int]] = deque([self._logged] * 2, maxlen=int(LOG_INTERVAL_SECONDS) + 2)
        self.server = ServerStats()

    def collect(self) -> list[Metric | Histogram]:
        """Return all metrics with their current values: those of the engine, its server and its extensions, and a 0 for
        each counter of ALWAYS that no extension counts.
        """
        found = [*self._counters(), *self._gauges(), *self._histograms(), *self.server.metrics()]
        found += [metric for each in self._engine.extensions.by_name.values() for metric in each.metrics()]
        names = {metric.name for metric in found}
        return found + [Counter(name, 0) for name in ALWAYS if name not in names]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all metrics as dicts of JSON values: their fields, and `kind`, which is "counter", "gauge" or
        "histogram".
        """
        return [{"kind": type(each).__name__.lower(), **dataclasses.asdict(each)} for each in self.collect()]

    def throughput(self) -> tuple[float, float]:
        """Return prompt tokens per second and generated tokens per second, over the last ten seconds."""
        now, prompt, generated = self._now()
        before = self._samples[0]
        for sample in self._samples:
            if now - sample[0] < LOG_INTERVAL_SECONDS:
                break
            before = sample
        seconds = max(now - before[0], 1e-3)
        # `before` may precede the window: samples are taken when tokens come, and none came between it and the window.
        return (prompt - before[1]) / seconds, (generated - before[2]) / seconds

    def stepped(self) -> None:
        """Record a sample of the token counts, for rates; with log_stats, log vLLM's line of statistics once every ten
        seconds of work. Must be called after each step.
        """
        sample, samples = self._now(), self._samples
        if (busy_since := self._engine.busy_since) > self._stepped:
            then, *counts = self._logged
            self._logged = (then + busy_since - self._stepped, *counts)
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
        """Log vLLM's line of statistics, with rates since the last line, and begin the next interval; the arguments are
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
        """Yield the counters of the engine loop, its scheduler and its runner."""
        engine, runner, counts = self._engine, self._engine.runner, self._engine.stats
        scheduler, finished = engine.scheduler, engine.request_stats.finished
        for name, value in {
            "vllm:prompt_tokens": engine.request_stats.num_prompt_tokens,
            "vllm:prompt_tokens_cached": engine.request_stats.num_cached_tokens,
            "vllm:generation_tokens": counts.num_generated_tokens,
            "vllm:num_preemptions": scheduler.num_preemptions,
            "vllm:prefix_cache_queries": scheduler.num_prefix_queries,
            "vllm:prefix_cache_hits": scheduler.num_prefix_hits,
            "vllm:corrupted_requests": engine.request_stats.num_corrupted,
            "vllm:admission_rejections": engine.request_stats.num_rejections,
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
        requests = engine.request_stats
        for source, count in {
            "local_compute": requests.num_prompt_tokens - requests.num_cached_tokens,
            "local_cache_hit": requests.num_cached_tokens - requests.num_external_tokens,
            "external_kv_transfer": requests.num_external_tokens,
        }.items():
            yield Counter("vllm:prompt_tokens_by_source", count, {"source": source})
        for reason, count in finished.items():
            yield Counter("vllm:request_success", count, {"finished_reason": reason.value})
        for part in ("schedule", "dispatch", "wait", "update"):
            yield Counter("jaxengine:step_host_seconds", getattr(counts, f"{part}_seconds"), {"part": part})
        for bucket, use in engine.stats.buckets.items():
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
        info = {
            "block_size": config.block_size,
            "num_gpu_blocks": scheduler.num_pages,
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
