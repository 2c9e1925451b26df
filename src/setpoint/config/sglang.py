"""The one table of spellings: what a user may write for an option, and which of SGLang's options
Setpoint does not have yet.

Works on option names and values as text. ``commandline`` parses command lines and calls this
module.
"""

from __future__ import annotations

import difflib
from collections.abc import Set

from setpoint.config.absent_backends import REFUSED_BACKENDS
from setpoint.config.groups.declare import flag_of
from setpoint.config.options import OPTION_FIELDS
from setpoint.core.errors import ConfigError

_OPTIONS = """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate allowed-media-domains api-key
asr-max-buffer-seconds=60 asr-max-concurrent-sessions=32 attention-backend
attention-context-parallel-size=1 attention-data-parallel-size=1 attn-cp-size=1 attn-dp-size=1
base-gpu-id=0 batch-notify-size=16 bf16-gemm-backend=auto boundary-reduction=auto
bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token c128-page-size=16
chat-template checkpoint-engine-wait-weights-before-ready chunked-prefill-size completion-template
config constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt
constrained-json-whitespace-pattern context-bucket context-length cp-strategy cpu-offload-gb=0
crash-dump-folder cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-decode
cuda-graph-bs-prefill cuda-graph-config cuda-graph-max-bs-decode cuda-graph-max-bs-prefill
cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context custom-weight-loader
data-parallel-size=1 dcp-comm-backend dcp-replicate-q-proj dcp-size=1 debug-cuda-graph
debug-tensor-dump-input-file debug-tensor-dump-layers debug-tensor-dump-output-folder
decode-attention-backend decode-context-parallel-size=1 decode-log-interval=40
decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank
decoupled-spec-role=null decrypted-config-file decrypted-draft-config-file deepep-config
deepep-dispatcher-output-dtype=auto deepep-mode=auto deepep-v2-mode=direct
default-chat-template-kwargs default-priority-value delete-ckpt-after-loading
detokenizer-worker-num=1 device disable-aiter-allreduce-fusion-in-decode
disable-aiter-allreduce-fusion-in-prefill disable-attn-tp-gather disable-chunked-prefix-cache
disable-cuda-graph disable-cuda-graph-padding disable-custom-all-reduce disable-decode-cuda-graph
disable-fast-image-processor disable-flashinfer-autotune
disable-flashinfer-cutlass-moe-fp4-allgather disable-hybrid-swa-memory disable-outlines-disk-cache
disable-overlap-schedule disable-prefill-cuda-graph disable-priority-preemption disable-radix-cache
disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port=8998
disaggregation-decode-allocation-policy=early disaggregation-decode-enable-offload-kvcache
disaggregation-decode-enable-radix-cache disaggregation-decode-extra-slots
disaggregation-decode-host-receive-threshold=1.0 disaggregation-decode-polling-interval=1
disaggregation-decode-retraction-backup disaggregation-enable-kv-checksum disaggregation-ib-device
disaggregation-mode=null disaggregation-transfer-backend=mooncake dist-init-addr dist-timeout
dllm-algorithm dllm-algorithm-config dllm-fdfo! download-dir dp-size=1 dsa-decode-backend
dsa-paged-mqa-logits-backend=auto dsa-prefill-backend dsa-topk-backend=sgl-kernel dsa-triton-union=0
dsv4-attn-backend=auto dsv4-prefill-backend=auto dtype=auto dwdp-size=1
dynamic-batch-tokenizer-batch-size=32 dynamic-batch-tokenizer-batch-timeout=0.002 elastic-ep-backend
elastic-ep-initial-size elastic-ep-join-mode elastic-ep-join-rank-offset=0
elastic-ep-scale-timeout=600 enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion
enable-amd-monokernel enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process
enable-cache-report enable-cp-decode-attn-tp enable-cudagraph-gc enable-custom-logit-processor
enable-decoder-swa-bounded-replay enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp
enable-deterministic-inference enable-dp-attention enable-dp-attention-local-control-broadcast
enable-dp-lm-head enable-draft-weights-cpu-backup enable-dsa-cache-layer-split
enable-dsa-fused-indexer enable-dynamic-batch-tokenizer enable-dynamic-chunking
enable-elastic-expert-backup enable-encoder-swa-bounded-replay enable-eplb
enable-flashinfer-allreduce-fusion enable-flexkv enable-forward-pass-metrics enable-fp32-lm-head
enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope enable-hicache enable-hierarchical-cache
enable-hisparse enable-http-worker-reuseport enable-http2 enable-int8-mamba-checkpoint
enable-kv-cache-sharding enable-layernorm-sp enable-layerwise-nvtx-marker enable-lean-attention
enable-linear-replayssm enable-linear-replayssm-spec enable-linker-mla-dedup enable-lmcache
enable-lora enable-lora-overlap-loading enable-mamba-cache-stochastic-rounding
enable-megamoe-for-layernorm-sp enable-memory-saver enable-metrics enable-metrics-for-all-schedulers
enable-mfu-metrics enable-mis enable-mixed-chunk enable-mm-global-cache enable-mscclpp
enable-multi-layer-eagle enable-multimodal enable-nccl-nvls enable-nvidia-megakernel
enable-p2p-check enable-page-major-kv-layout enable-paged-experts enable-pd-role-switch enable-pdmux
enable-precise-embedding-interpolation enable-prefill-cp enable-prefill-delayer
enable-prefix-mm-cache enable-priority-scheduling enable-profile-cuda-graph
enable-quant-communications enable-request-time-stats-logging enable-response-store
enable-return-aux-hidden-states enable-return-hidden-states enable-return-indexer-topk
enable-return-routed-experts enable-scattered-sconv enable-session-radix-cache
enable-shared-experts-attn-tp enable-single-batch-overlap enable-ssl-refresh
enable-streaming-session enable-strict-thinking enable-symm-mem enable-tf32-matmul
enable-tokenizer-batch-encode enable-torch-compile enable-torch-compile-debug-mode
enable-torch-symm-mem enable-tp-lm-head-all-to-all enable-trace enable-two-batch-overlap
enable-unified-cache-external-linker enable-unified-memory enable-w4a4-mxfp4-megamoe
enable-waterfill enable-watermark enable-weights-cpu-backup encoder-bootstrap-port=8997 encoder-only
encoder-register-urls encoder-transfer-backend=auto encoder-urls
enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion
engine-info-bootstrap-port=6789 ep=1 ep-dispatch-algorithm ep-num-redundant-experts=0 ep-size=1
eplb-algorithm=auto eplb-min-rebalancing-utilization-threshold=1.0 eplb-rebalance-layers-per-chunk
eplb-rebalance-num-iterations=1000 expert-balancedness-report-mode=off
expert-distribution-recorder-buffer-size expert-distribution-recorder-mode expert-parallel-size=1
experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels
fastapi-root-path= file-storage-path flashinfer-a2a-dispatch-type
flashinfer-allreduce-fusion-backend flashinfer-autotune-skip-ops flashinfer-mla-disable-ragged
flashinfer-mxfp4-moe-precision=default flexkv-config-file forward-hooks
forward-pass-metrics-ipc-name forward-pass-metrics-worker-id= fp4-gemm-backend=auto
fp8-gemm-backend=auto fuseep-mode=2 gated-launch-port gc-threshold gc-warning-threshold-secs=0.0
generation-tokens-buckets gpu-id-step=1 grammar-backend grpc-http-sidecar-port grpc-mode grpc-port
grpc-response-timeout-secs=300 hf-chat-template-name hicache-host-memory-fraction=0.8
hicache-host-memory-mode=cache hicache-io-backend=kernel hicache-mem-layout=page_first hicache-ratio
hicache-size=0 hicache-storage-backend hicache-storage-backend-extra-config
hicache-storage-prefetch-policy=timeout hicache-storage-prefetch-retry-max-attempts=8
hicache-storage-prefetch-retry-poll-interval=8 hicache-write-policy=write_through
hierarchical-sparse-attention-extra-config hisparse-config host=127.0.0.1
http2-initial-connection-window-size=1048576 http2-max-concurrent-streams=200
image-processor-backend=auto incremental-streaming-output init-expert-location=trivial
int8-mamba-ckpt-size is-embedding json-model-override-args={} kt-cpuinfer
kt-max-deferred-experts-per-token kt-method=AMXINT4 kt-num-gpu-experts kt-threadpool-count=2
kt-weight-path kv-cache-dtype=auto kv-canary=none kv-canary-real-data=none
kv-canary-sweep-interval=0 kv-events-config language-model-only language-only
limit-mm-data-per-request linear-attn-backend=triton linear-attn-decode-backend
linear-attn-prefill-backend linear-attn-verify-backend linear-replayssm-cache-len=16
lmcache-config-file load-balance-method=auto load-format=auto load-publish-endpoint
load-snapshot-publish-interval=15 log-level=info log-level-http log-requests
log-requests-format=text log-requests-level=2 log-requests-target lora-backend=csgmv
lora-drain-wait-threshold=0.0 lora-eviction-policy=lru lora-paths lora-strict-loading
lora-target-modules lora-use-virtual-experts mamba-backend=triton mamba-cache-philox-rounds=0
mamba-full-memory-ratio mamba-max-states-per-path=-1 mamba-radix-cache-strategy=auto mamba-ssm-dtype
mamba-track-interval=256 max-ep-size max-loaded-loras max-lora-chunk-size=16 max-lora-rank
max-loras-per-batch=8 max-mamba-cache-size max-prefill-tokens=16384 max-queued-requests
max-running-requests max-total-tokens media-url-max-file-size-mb=64 mem-fraction-static
min-free-slots-delay mlx-enable-sampling mm-attention-backend mm-enable-dp-encoder
mm-feature-transport mm-global-cache-backend=mooncake mm-io-worker-num=0 mm-preprocess-cache-size-mb
mm-process-config mm-processor-worker-num=0 model model-checksum model-config-parser=auto
model-impl=auto model-loader-extra-config={} model-path model-type modelexpress-config
modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant
moe-a2a-backend=none moe-data-parallel-size=1 moe-dense-tp-size moe-dp-size=1
moe-runner-backend=auto monokernel-backend mooncake-ib-device msprobe-dump-config nccl-init-addr
nccl-port nnodes=1 no-dcp-replicate-q-proj no-dllm-fdfo no-enable-decoder-swa-bounded-replay
no-enable-dsa-fused-indexer no-enable-fused-qk-norm-rope no-enable-tf32-matmul
no-enable-tp-lm-head-all-to-all no-experts-shared-outer-loras no-lora-strict-loading!
no-mm-enable-dp-encoder no-ple-offload-embedding no-speculative-enable-w4a4-mxfp4-megamoe
node-rank=0 num-continuous-decode-steps=1 num-reserved-decode-tokens=512 numa-node
offload-group-size=-1 offload-mode=cpu offload-num-in-group=1 offload-prefetch-step=1
optimistic-prefill-attempts=0 otlp-service-name otlp-traces-endpoint=localhost:4317 page-size
paged-experts-num-resident pdmux-config-path pipeline-parallel-size=1 ple-offload-backend=pinned
ple-offload-dir ple-offload-embedding port=30000 pp-async-batch-depth=0 pp-max-micro-batch-size
pp-size=1 pre-warm-nccl preferred-sampling-params prefill-attention-backend prefill-decode-interval
prefill-decode-interval-min-bs=0 prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-ms
prefill-delayer-max-delay-passes=30 prefill-delayer-queue-min-ratio
prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets
prefill-kv-cache-dequant-dtype=auto prefill-max-requests prefill-only-disable-kv-cache
priority-scheduling-preemption-threshold=10 prompt-tokens-buckets qsa-indexer-dtype=auto
quantization quantization-param-path quantize-and-serve radix-cache-backend
radix-eviction-policy=lru radix-eviction-policy-config random-seed reasoning-parser
remote-instance-weight-loader-backend=nccl remote-instance-weight-loader-seed-instance-ip
remote-instance-weight-loader-seed-instance-service-port
remote-instance-weight-loader-send-weights-group-ports
remote-instance-weight-loader-start-seed-via-transfer-engine retraction-policy=length
return-aux-hidden-state-layer-ids return-hidden-states-mode return-input-ids return-output-ids
revision rl-on-policy-target rl-quant-profile sampling-backend sampling-defaults=model
sampling-mask-max-tokens=4096 schedule-conservativeness=1.0 schedule-low-priority-values-first
schedule-policy=fcfs scheduler-recv-interval=1 served-model-name shared-experts-tp-size
show-time-cost sidecar sidecar-args skip-server-warmup skip-tokenizer-init sleep-on-idle
sm-group-num=8 smg-grpc-mode smg-http-sidecar-port soft-watchdog-timeout spec-trace-dir
speculative-accept-threshold-acc=1.0 speculative-accept-threshold-single=1.0 speculative-adaptive
speculative-adaptive-config speculative-algorithm speculative-attention-mode=prefill
speculative-dflash-block-size speculative-domino-candidate-pool-size=2048
speculative-draft-attention-backend speculative-draft-kv-cache-dtype speculative-draft-load-format
speculative-draft-model speculative-draft-model-path speculative-draft-model-quantization
speculative-draft-model-revision speculative-draft-sink-size speculative-draft-window-size
speculative-dsa-topk-backend=sgl-kernel speculative-dspark-align-verify-tokens-to-graph-tier
speculative-dspark-block-size speculative-dspark-confidence-sts-path
speculative-dspark-sps-table-path speculative-eagle-topk speculative-enable-w4a4-mxfp4-megamoe
speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity=10000000
speculative-ngram-external-corpus-max-tokens=10000000 speculative-ngram-external-corpus-path
speculative-ngram-external-sam-budget=0 speculative-ngram-match-type=BFS
speculative-ngram-max-bfs-breadth=10 speculative-ngram-max-trie-depth=18
speculative-ngram-min-bfs-breadth=1 speculative-num-draft-tokens speculative-num-steps
speculative-token-map speculative-use-block-verification speculative-use-rejection-sampling
ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password startup-weight-load-mode=serial
stream-interval=1 stream-response-default-include-usage strip-thinking-cache swa-full-tokens-ratio
swa-prefix-tails tbo-token-distribution-threshold=0.48 tensor-parallel-size=1
tokenizer-backend=huggingface tokenizer-metrics-allowed-custom-labels
tokenizer-metrics-custom-labels-header=x-custom-labels tokenizer-mode=auto tokenizer-path
tokenizer-worker-num=1 tool-call-parser tool-server torch-compile-max-bs=32 tp-size=1
trace-modules=request triton-attention-num-kv-splits=8 triton-attention-reduce-in-fp32
triton-attention-split-tile-size trust-mm-content-hashes trust-remote-code
trust-request-chat-template unified-cache-external-linker-backend=mooncake
unified-cache-external-linker-config uno-lora-path use-ray uvicorn-access-log-exclude-prefixes
warmups watchdog-timeout=300 watermark-config weight-cache-mode=off weight-cache-socket
weight-cache-timeout=1800 weight-loader-disable-mmap weight-loader-drop-cache-after-load
weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads=4 weight-version=default
"""
"""``name=value``: takes a value, whose default is this one. ``name!``: takes no value and asks for
the default behaviour. ``name``: any other option."""

KNOWN = frozenset("--" + word.rstrip("!").partition("=")[0] for word in _OPTIONS.split())
DEFAULTS = {
    f"--{name}": value
    for name, equals, value in (word.partition("=") for word in _OPTIONS.split())
    if equals
}
"""Option -> SGLang's default value, as written on a command line."""
IMPLIED = frozenset("--" + word.rstrip("!") for word in _OPTIONS.split() if word.endswith("!"))
"""Options without a value that ask for what SGLang does by default."""


KNOWN_VALUES = {
    "hicache_storage_backend": (
        *(
            "hf3fs",
            "nixl",
            "mooncake",
            "sim",
            "npu_memcache",
            "aibrix",
            "eic",
            "simm",
            "mori",
            "shm",
            "tensorcast",
        ),
        "seaweedfs",
    ),
    "hicache_io_backend": ("kernel_ascend",),
    "hicache_mem_layout": ("page_first_kv_split", "page_head"),
    "tool_call_parser": (
        "apertus2509",
        "beam",
        "cohere_command4",
        "dots",
        "gigachat3",
        "gigachat35",
        "inkling",
        "interns1",
        "iquest_q1",
        "k2_horizon",
        "kimi_k3",
        "ling3",
        "minicpm5",
        "minimax-m3",
        "muse",
        "nanbeige",
        "poolside_v1",
        "response_template",
        "spark25",
        "trinity",
    ),
    "reasoning_parser": (
        "apertus2509",
        "beam",
        "cohere_command4",
        "dots",
        "gigachat35",
        "hunyuan",
        "inkling",
        "iquest_q1",
        "k2_horizon",
        "kimi_k3",
        "ling3",
        "minimax-append-think",
        "muse",
        "nanbeige",
        "poolside_v1",
        "response_template",
    ),
    "grammar_backend": ("outlines",),
    "model_impl": ("mindspore",),
    "quantization": (
        *(
            "mxfp8",
            "gguf",
            "modelopt",
            "modelopt_fp8",
            "modelopt_fp4",
        ),
        *(
            "modelopt_mixed",
            "nvfp4_online",
            "petit_nvfp4",
            "w8a8_fp8",
            "w4afp8",
            "auto-round",
            "auto-round-int8",
        ),
        *(
            "modelslim",
            "mxfp_w4a8",
            "quark",
            "quark_int4fp8_moe",
            "quark_mxfp4",
            "mlx_q4",
            "mlx_q8",
            "humming",
        ),
    ),
    "kv_cache_dtype": ("mxfp8", "nvfp4", "fp4_mx_block16"),
    "disaggregation_transfer_backend": ("nixl", "mori", "ascend", "fake"),
    "moe_a2a_backend": (
        *("deepep", "deepep_v2", "mooncake", "nixl", "mori", "ascend_fuseep", "ascend_tp"),
        *("flashinfer", "flashinfer_megamoe", "megamoe", "pplx"),
    ),
    "expert_distribution_recorder_mode": ("stat_approx", "per_pass", "per_token"),
    "device": ("xpu", "npu", "hpu", "mps", "musa"),
    "load_format": (
        *(
            "pt",
            "npcache",
            "sharded_state",
            "presharded",
            "bitsandbytes",
            "layered",
            "flash_rl",
            "remote",
            "remote_instance",
        ),
        *(
            "fastsafetensors",
            "runai_streamer",
            "mistral",
            "instanttensor",
            "expert_pack",
            "private",
        ),
    ),
    **{field: tuple(names) for field, names in REFUSED_BACKENDS.items()},
    "cuda_graph_backend_decode": ("breakable",),
}
"""Values of an option that SGLang accepts and this version does not."""
_SIZES = ("pp_size", "moe_dense_tp_size")


def is_known_value(field: str, value: object) -> bool:
    """Whether SGLang accepts ``value`` for an option that has fewer choices here."""
    return value in KNOWN_VALUES.get(field, ()) or (
        field in _SIZES and isinstance(value, int) and value > 1
    )


ALIASES = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--nccl-init-addr": "--dist-init-addr",
    "--pipeline-parallel-size": "--pp-size",
    "--expert-parallel-size": "--ep-size",
    "--ep": "--ep-size",
    "--enable-hicache": "--enable-hierarchical-cache",
    # In older guides. SGLang 0.5.23 no longer has these two names; they mean decode steps.
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
}
"""Other spellings of an option, supported or not."""

SUPPORTED = {field.flag: field for field in OPTION_FIELDS}
"""Options of a server and its engine, by canonical spelling. A command may have more of its own
(``commands``)."""


INSTEAD = {
    "--ep-dispatch-algorithm": "A token's position chooses the copy of its expert; leave it out.",
    "--cuda-graph-backend-decode": "A decode step is captured whole: take full.",
    "--disaggregation-transfer-backend": (
        "Setpoint moves keys and values through shared memory or TCP; leave it out. nixl, mori and"
        " ascend need their libraries and RDMA hardware, for which there is no adapter yet."
    ),
    "--enable-custom-logit-processor": (
        "It would run Python code that clients send, and Setpoint lets no client run code in the"
        " server. Use logit_bias or a constraint."
    ),
    "--hicache-storage-backend": (
        "file works on any folder of this machine, and obstore on what speaks S3. For another"
        " storage write a class of eight methods and name it with dynamic"
        " (docs/hierarchical-cache.md, 'Write your own storage')."
    ),
    "--kv-cache-dtype": "The smallest KV cache types of this version are fp8_e4m3 and fp8_e5m2.",
    "--moe-a2a-backend": ("Every rank has all tokens, so no all-to-all is needed. Leave it out."),
    "--quantization": (
        "w8a8_int8 and fp8 store weights in 8 bits. On a CPU, blocks_int8 multiplies the blocks of"
        " a GGUF file by activations of 8 bits. A GGUF file and a folder that is quantized already"
        " need no --quantization."
    ),
    "--use-ray": (
        "The engines are child processes of the server. deploy/ray shows how Ray Serve starts"
        " whole servers, one for each replica."
    ),
}
"""Option -> advice for users who ask for a feature that SGLang has and this version does not."""

_SGLANG = {*KNOWN, *ALIASES, "--help"}


def canonical(
    spelling: str,
    supported: Set[str] = SUPPORTED.keys(),
    *,
    command: str = "'setpoint serve'",
    manual: str = "'setpoint serve --help'",
) -> str:
    """The option meant by ``spelling``: a flag in ``supported`` (those of ``command``), ``--help``,
    or one that only SGLang has.

    Accepts aliases and unambiguous prefixes. A prefix that SGLang's parser understands means the
    same here; any other prefix is looked up among the supported options. Raises ConfigError for an
    option that belongs to another command, for an ambiguous prefix, and for an unknown option
    (naming the nearest ones).
    """
    spellings = {*_SGLANG, *supported}
    meant = (
        {_target(spelling)}
        if spelling in spellings
        else _completions(spelling, spellings, supported)
    )
    if not meant:
        raise ConfigError(
            f"unknown option {spelling}.{_suggestion(spelling, spellings, supported, manual)}"
        )
    if len(meant) > 1 and not meant & {*supported, "--help"}:
        raise ConfigError(
            f"{_listed(sorted(meant))} are options of SGLang, and this version of Setpoint"
            " supports none of them yet."
        )
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    (flag,) = meant
    if flag in SUPPORTED and flag not in supported:
        raise ConfigError(f"{flag} belongs to 'setpoint serve'; {command} has no use for it.")
    return flag


def exact(spelling: str, flags: Set[str], *, manual: str) -> str:
    """``spelling``, if it is one of ``flags`` in full. Raises ConfigError otherwise: the error of
    ``refusal`` for an option that only SGLang has, and for any other name an error that suggests
    similar ones.
    """
    if spelling in flags:
        return spelling
    if spelling in KNOWN and spelling not in ALIASES:
        raise refusal(spelling, spelling)
    begun = sorted(flag for flag in flags if flag.startswith(spelling))
    meant = f" Did you mean {_listed(begun, 'or')}?" if begun else ""
    raise ConfigError(
        f"unknown option {spelling}.{meant or _suggestion(spelling, flags, flags, manual)}"
    )


def is_default(flag: str, value: str | None) -> bool:
    """Whether ``flag`` with ``value`` (None: without a value) asks SGLang for its default
    behaviour."""
    if value is None:
        return flag in IMPLIED
    default = DEFAULTS.get(flag)
    return default is not None and (
        value == default or _as_number(value) == _as_number(default) is not None
    )


def default(field: str) -> str | None:
    """SGLang's default for the option of a field name, as its command line would spell it; None if
    it is unknown."""
    flag = flag_of(field)
    return "" if flag in IMPLIED else DEFAULTS.get(flag)


def refusal(flag: str, spelling: str) -> ConfigError:
    """The error for an option that only SGLang has."""
    written = "" if flag == spelling else f" (written {spelling})"
    return ConfigError(
        f"{flag}{written} is an option of SGLang that is not supported by this version of Setpoint"
        f" yet.{instead(flag)}"
    )


def instead(flag: str, value: object = None) -> str:
    """A sentence of advice to append when the option or its value is refused; "" if there is
    none."""
    reason = REFUSED_BACKENDS.get(field_name(flag), {}).get(str(value), "")
    if reason:
        return f" {reason[0].upper()}{reason[1:]}."
    return f" {INSTEAD[flag]}" if flag in INSTEAD else ""


def own_flag(spelling: str, flags: Set[str], *, manual: str) -> str:
    """Like :func:`canonical`, for a command that starts no engine: looks only at the command's own
    ``flags``."""
    spellings = {*flags, "--help"}
    meant = {spelling} & spellings or {name for name in spellings if name.startswith(spelling)}
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    if not meant:
        raise ConfigError(
            f"unknown option {spelling}.{_suggestion(spelling, spellings, spellings, manual)}"
        )
    return meant.pop()


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _completions(prefix: str, spellings: Set[str], supported: Set[str]) -> set[str]:
    complete = [name for name in spellings if name.startswith(prefix)]
    sglang = {_target(name) for name in complete if name in _SGLANG}
    if len(sglang) == 1:
        return sglang
    everything = {_target(name) for name in complete}
    return everything & {*supported, "--help"} or everything


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _target(spelling: str) -> str:
    return ALIASES.get(spelling, spelling)


def _suggestion(spelling: str, spellings: Set[str], supported: Set[str], manual: str) -> str:
    # An option that is refused would not help, unless it was mistyped.
    close = difflib.get_close_matches(spelling, sorted(spellings), n=3, cutoff=0.75)
    close = [name for name in close if _is_alike(spelling, name)]
    mistyped = difflib.get_close_matches(spelling, close, n=1, cutoff=0.9)
    if not mistyped or mistyped[0] in supported:
        close = [name for name in close if name in supported]
    return f" Did you mean {_listed(close, 'or')}?" if close else f" See {manual}."


def _is_alike(spelling: str, name: str) -> bool:
    """Whether two options resemble each other in more than the word with which many begin."""
    for word in ("--enable-", "--disable-"):
        if spelling.startswith(word) and name.startswith(word):
            ends = spelling.removeprefix(word), name.removeprefix(word)
            return difflib.SequenceMatcher(None, *ends).ratio() >= 0.6
    return True


def _listed(names: list[str], word: str = "and") -> str:
    if len(names) > 6:
        return f"{', '.join(names[:6])} and {len(names) - 6} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
