// SPDX-License-Identifier: Apache-2.0

//! The command line: names, variables and defaults of `python -m dynamo.frontend` 1.6.1.
//!
//! Nothing here touches Dynamo's runtime. What the options mean is in [`crate::config`].

use std::any::TypeId;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{
    ArgAction, ArgMatches, Args, Command, CommandFactory, FromArgMatches, Parser, ValueEnum,
};

use crate::unsupported;
use crate::values::{self, ConditionalDisagg, Nullable};

#[cfg(test)]
mod tests;

const U32: u32 = u32::MAX;
const ONE_YEAR_SECS: u64 = 31_536_000;

/// Why the program does not start: one line, exit code 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal(pub(crate) String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// What comes of a command line that yields no options.
#[derive(Debug)]
pub(crate) enum Stop {
    /// `--help` or `--version`: to be printed, exit code 0.
    Show(clap::Error),
    /// Something is wrong.
    Refuse(Refusal),
}

/// Declares a group of switches in Python's style: `--name`, `--no-name` and a variable.
///
/// The last of the two on the command line wins, and either beats the variable. clap's own
/// `overrides_with` cannot say this: to it, a variable conflicts with the negative option.
macro_rules! switches {
    ($(#[$about:meta])* $group:ident, $heading:literal, {
        $($(#[doc = $doc:literal])+
        $on:ident / $off:ident, $variable:literal = $default:literal
        $(, formerly $alias:literal / $no_alias:literal)?;)+
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Args)]
        #[command(next_help_heading = $heading)]
        pub(crate) struct $group {
            $($(#[doc = $doc])+
            #[arg(long, env = $variable, action = ArgAction::SetTrue, default_value = $default,
                  value_parser = values::switch $(, alias = $alias)?)]
            $on: bool,
            #[arg(long, action = ArgAction::SetTrue, hide = true $(, alias = $no_alias)?)]
            $off: bool,)+
        }

        impl $group {
            /// Drops each negative option that its positive one follows.
            fn settle(&mut self, matches: &ArgMatches) {
                $(self.$off &= !follows(matches, stringify!($on), stringify!($off));)+
            }

            $($(#[doc = $doc])+
            pub(crate) fn $on(&self) -> bool {
                self.$on && !self.$off
            })+
        }
    };
}

/// Whether `on` stands on the command line, behind `off`.
fn follows(matches: &ArgMatches, on: &str, off: &str) -> bool {
    let last = |id| match matches.value_source(id) {
        Some(ValueSource::CommandLine) => matches.indices_of(id)?.next_back(),
        _ => None,
    };
    last(on).is_some() && last(on) > last(off)
}

/// How a request finds its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// The less busy of two random ones.
    PowerOfTwo,
    /// By cached prefix and load.
    Kv,
    /// The one that the request names.
    Direct,
    /// The one with the fewest requests.
    LeastLoaded,
    /// By device type.
    DeviceAwareWeighted,
}

/// Dynamo's HTTP frontend with its discovery, planes and KV router, built from Dynamo's crates.
///
/// Options, variables and defaults are those of `python -m dynamo.frontend` 1.6.1. An option
/// beats its variable. Every switch has a --no-... form.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "kvdelta-frontend",
    version = VERSION,
    args_override_self = true,
    after_help = EXAMPLES
)]
pub(crate) struct Options {
    /// HTTP address, namespaces and block size.
    #[command(flatten)]
    pub(crate) http: HttpOptions,
    /// What the HTTP side speaks.
    #[command(flatten)]
    pub(crate) api: ApiOptions,
    /// Switches of the HTTP side.
    #[command(flatten)]
    pub(crate) api_switches: ApiSwitches,
    /// Discovery and transports.
    #[command(flatten)]
    pub(crate) planes: PlaneOptions,
    /// Routing in every mode.
    #[command(flatten)]
    pub(crate) router: RouterOptions,
    /// The KV router's numbers and choices.
    #[command(flatten)]
    pub(crate) kv: KvOptions,
    /// The KV router's switches.
    #[command(flatten)]
    pub(crate) kv_switches: KvSwitches,
    /// Certificates.
    #[command(flatten)]
    pub(crate) tls: TlsOptions,
    /// TLS switches.
    #[command(flatten)]
    pub(crate) tls_switches: TlsSwitches,
    /// Options that Dynamo itself accepts and ignores.
    #[command(flatten)]
    pub(crate) ignored: IgnoredOptions,
    /// Switches that Dynamo itself accepts and ignores.
    #[command(flatten)]
    pub(crate) ignored_switches: IgnoredSwitches,
}

const EXAMPLES: &str = "\
Examples:
  Workers found through a folder, no etcd and no NATS:
    DYN_FILE_KV=/tmp/kv kvdelta-frontend --discovery-backend file --router-mode kv

  Another port, and only models of one namespace:
    kvdelta-frontend --http-port 9000 --namespace prod --router-mode kv

  Prefer decode workers that hold the prompt's prefix (patched Dynamo only):
    kvdelta-frontend --router-mode kv --router-decode-overlap-score-weight 2.0

Logging follows DYN_LOG. SIGINT and SIGTERM end the program cleanly, a second one at once.
Exit codes: 0 ended when asked to, 1 failed, 2 an option, variable or file that cannot be used.";

#[cfg(kvdelta_patched)]
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (Dynamo 1.6.1 with decode_overlap_score_weight)"
);
#[cfg(not(kvdelta_patched))]
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (Dynamo 1.6.1, unpatched)");

/// HTTP address, namespaces and block size.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpOptions {
    /// Address to listen on.
    #[arg(long, env = "DYN_HTTP_HOST", default_value = "0.0.0.0")]
    pub(crate) http_host: String,
    /// Port to listen on.
    #[arg(long, env = "DYN_HTTP_PORT", default_value = "8000",
          value_parser = |text: &str| values::whole(text, 0, u16::MAX))]
    pub(crate) http_port: u16,
    /// Serve the models of this namespace only.
    #[arg(long, env = "DYN_NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Serve the models of namespaces that start so; beats --namespace.
    #[arg(long, env = "DYN_NAMESPACE_PREFIX")]
    pub(crate) namespace_prefix: Option<String>,
    /// Model name.
    #[arg(long, env = "DYN_MODEL_NAME", value_parser = values::name)]
    pub(crate) model_name: Option<String>,
    /// Model folder on disk.
    #[arg(long, env = "DYN_MODEL_PATH")]
    pub(crate) model_path: Option<PathBuf>,
    /// Prefix of the frontend's metrics.
    #[arg(long, env = "DYN_METRICS_PREFIX")]
    pub(crate) metrics_prefix: Option<String>,
    /// How often a request may move to another worker after a failure.
    #[arg(long, env = "DYN_MIGRATION_LIMIT", default_value = "0",
          value_parser = |text: &str| values::whole(text, 0, U32))]
    pub(crate) migration_limit: u32,
    /// Tokens (prompt and output) above which a request no longer moves.
    #[arg(long, env = "DYN_MIGRATION_MAX_SEQ_LEN",
          value_parser = |text: &str| values::whole(text, 1, U32))]
    pub(crate) migration_max_seq_len: Option<u32>,
    /// Port of metrics and health beside --kserve-grpc-server.
    #[arg(long, env = "DYN_GRPC_METRICS_PORT", default_value = "8788",
          value_parser = |text: &str| values::whole(text, 0, u16::MAX))]
    pub(crate) grpc_metrics_port: u16,
}

/// What the HTTP side speaks.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "API")]
pub(crate) struct ApiOptions {
    /// Response field that carries reasoning.
    #[arg(long, env = "DYN_REASONING_FIELD_NAME", default_value = "reasoning_content",
          value_parser = ["reasoning_content", "reasoning"])]
    pub(crate) reasoning_field_name: String,
    /// Tokenizer for BPE models.
    #[arg(long, env = "DYN_TOKENIZER", default_value = "default",
          value_parser = ["default", "fastokens", "basetenkenizer"])]
    pub(crate) tokenizer: String,
}

switches! {
    /// Switches of the HTTP side.
    ApiSwitches, "API", {
        /// Serve KServe's gRPC protocol at --http-port in place of HTTP.
        kserve_grpc_server / no_kserve_grpc_server, "DYN_KSERVE_GRPC_SERVER" = "false";
        /// Fall back to the default tokenizer when the chosen one cannot load the model's.
        tokenizer_fallback / no_tokenizer_fallback, "DYN_TOKENIZER_FALLBACK" = "true";
        /// Serve the Anthropic Messages API (experimental in Dynamo).
        enable_anthropic_api / no_enable_anthropic_api, "DYN_ENABLE_ANTHROPIC_API" = "false";
        /// Strip the Claude Code billing preamble from system prompts.
        strip_anthropic_preamble / no_strip_anthropic_preamble,
            "DYN_STRIP_ANTHROPIC_PREAMBLE" = "true";
        /// Send tool calls as they complete (experimental in Dynamo).
        enable_streaming_tool_dispatch / no_enable_streaming_tool_dispatch,
            "DYN_ENABLE_STREAMING_TOOL_DISPATCH" = "false";
        /// Send reasoning as one event when it ends (experimental in Dynamo).
        enable_streaming_reasoning_dispatch / no_enable_streaming_reasoning_dispatch,
            "DYN_ENABLE_STREAMING_REASONING_DISPATCH" = "false";
    }
}

/// Discovery and transports.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Discovery and planes")]
pub(crate) struct PlaneOptions {
    /// Where workers are found; `file` uses the folder DYN_FILE_KV, etcd the ETCD_* variables.
    #[arg(long, env = "DYN_DISCOVERY_BACKEND", default_value = "etcd",
          value_parser = ["kubernetes", "etcd", "file", "mem"])]
    pub(crate) discovery_backend: String,
    /// How requests reach workers.
    #[arg(long, env = "DYN_REQUEST_PLANE", default_value = "tcp", value_parser = ["nats", "tcp"])]
    pub(crate) request_plane: String,
    /// How answers come back; workers must use the same.
    #[arg(long, env = "DYN_RESPONSE_PLANE", default_value = "tcp", value_parser = ["tcp", "quic"])]
    pub(crate) response_plane: String,
    /// How events travel; zmq if not set.
    #[arg(long, env = "DYN_EVENT_PLANE", value_parser = ["nats", "zmq"])]
    pub(crate) event_plane: Option<String>,
}

/// Routing in every mode.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Router")]
pub(crate) struct RouterOptions {
    /// How a request finds its worker.
    #[arg(
        long,
        env = "DYN_ROUTER_MODE",
        value_enum,
        default_value = "round-robin"
    )]
    pub(crate) router_mode: Mode,
    /// Tokens in a KV block.
    #[arg(long, env = "DYN_KV_CACHE_BLOCK_SIZE",
          value_parser = |text: &str| values::whole(text, 1, U32))]
    pub(crate) kv_cache_block_size: Option<u32>,
    /// Workers to wait for at start; 0 does not wait.
    #[arg(long, env = "DYN_ROUTER_MIN_INITIAL_WORKERS", default_value = "0",
          value_parser = |text: &str| values::whole(text, 0, U32))]
    pub(crate) router_min_initial_workers: u32,
    /// Bind sessions to workers, with this idle time in seconds.
    #[arg(long, env = "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
          value_parser = |text: &str| values::whole(text, 1, ONE_YEAR_SECS))]
    pub(crate) router_session_affinity_ttl_secs: Option<u64>,
    /// A session's worker is a must (hard) or a wish (soft).
    #[arg(long, env = "DYN_ROUTER_SESSION_AFFINITY_MODE", default_value = "hard",
          value_parser = ["hard", "soft"])]
    pub(crate) router_session_affinity_mode: String,
    /// Busy above this fraction of KV blocks in use, 0 to 1, or None.
    #[arg(long, env = "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
          value_parser = |text: &str| values::nullable(text, values::fraction))]
    pub(crate) active_decode_blocks_threshold: Option<Nullable<f64>>,
    /// Busy above this many tokens in prefill, or None.
    #[arg(long, env = "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
          value_parser = |text: &str| values::nullable(text, |text| values::whole(text, 0, u64::MAX)))]
    pub(crate) active_prefill_tokens_threshold: Option<Nullable<u64>>,
    /// Busy above this fraction of max_num_batched_tokens in prefill, or None.
    #[arg(long, env = "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
          value_parser = |text: &str| values::nullable(text, values::non_negative))]
    pub(crate) active_prefill_tokens_threshold_frac: Option<Nullable<f64>>,
}

/// The KV router's numbers and choices.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "KV router")]
pub(crate) struct KvOptions {
    /// YAML with the router's settings, queues and policies; its settings beat the options here
    /// but for the decode overlap weight.
    #[arg(long, env = "DYN_ROUTER_POLICY_CONFIG")]
    pub(crate) router_policy_config: Option<String>,
    /// Weight of the prefix that a decode worker holds already; 0 is off (patched Dynamo only).
    #[arg(long, env = "DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT", value_name = "WEIGHT",
          value_parser = values::non_negative)]
    pub(crate) router_decode_overlap_score_weight: Option<f64>,
    /// Whether that weight comes from its variable.
    #[arg(skip)]
    pub(crate) weight_is_of_variable: bool,
    /// Credit for a prefix in device memory.
    #[arg(long, env = "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", value_name = "CREDIT",
          default_value = "1.0", value_parser = values::non_negative)]
    pub(crate) router_kv_overlap_score_credit: f64,
    /// How fast that credit falls with a worker's prefill load.
    #[arg(long, env = "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY", value_name = "DECAY",
          default_value = "0.0", value_parser = values::non_negative)]
    pub(crate) router_kv_overlap_score_credit_decay: f64,
    /// The older name of --router-prefill-load-scale; 0 also sets the credit to 0.
    #[arg(long, env = "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", alias = "kv-overlap-score-weight",
          hide = true, value_parser = values::non_negative)]
    pub(crate) router_kv_overlap_score_weight: Option<f64>,
    /// Scale of the prefill load that is left after all credit.
    #[arg(long, env = "DYN_ROUTER_PREFILL_LOAD_SCALE", value_name = "SCALE",
          default_value = "1.0", value_parser = values::non_negative)]
    pub(crate) router_prefill_load_scale: f64,
    /// Cost of each running request, in blocks.
    #[arg(long, env = "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", value_name = "WEIGHT",
          default_value = "0.0", value_parser = values::non_negative)]
    pub(crate) router_decode_active_request_weight: f64,
    /// Credit for a prefix in host memory.
    #[arg(long, env = "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", value_name = "WEIGHT",
          default_value = "0.75", value_parser = values::fraction)]
    pub(crate) router_host_cache_hit_weight: f64,
    /// Credit for a prefix on disk.
    #[arg(long, env = "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", value_name = "WEIGHT",
          default_value = "0.25", value_parser = values::fraction)]
    pub(crate) router_disk_cache_hit_weight: f64,
    /// Randomness of the choice; 0 takes the best.
    #[arg(long, env = "DYN_ROUTER_TEMPERATURE", value_name = "TEMPERATURE",
          default_value = "0.0", value_parser = values::non_negative)]
    pub(crate) router_temperature: f64,
    /// How sequences are hashed for load tracking.
    #[arg(long, env = "DYN_ROUTER_TRACKING_HASH", default_value = "public-xxh3-v1",
          value_parser = ["public-xxh3-v1", "keyed-xxh3-v1"])]
    pub(crate) router_tracking_hash: String,
    /// File with the 32-byte key of keyed hashing.
    #[arg(long, env = "DYN_ROUTER_TRACKING_KEY_FILE")]
    pub(crate) router_tracking_key_file: Option<PathBuf>,
    /// Name of that key's epoch.
    #[arg(long, env = "DYN_ROUTER_TRACKING_KEY_ID")]
    pub(crate) router_tracking_key_id: Option<String>,
    /// Model of prefill time; `ais` needs Python and is refused.
    #[arg(long, env = "DYN_ROUTER_PREFILL_LOAD_MODEL", default_value = "none",
          value_parser = ["none", "ais", "aic"])]
    pub(crate) router_prefill_load_model: String,
    /// How long a predicted block counts, in seconds, without KV events.
    #[arg(long, env = "DYN_ROUTER_TTL_SECS", value_name = "SECONDS", default_value = "120.0",
          value_parser = values::seconds)]
    pub(crate) router_ttl_secs: f64,
    /// How predicted blocks leave, without KV events.
    #[arg(long, env = "DYN_ROUTER_APPROXIMATE_CACHE_POLICY", default_value = "ttl",
          value_parser = ["ttl", "lru"])]
    pub(crate) router_approximate_cache_policy: String,
    /// How long a predicted block counts, in seconds, beside KV events.
    #[arg(long, env = "DYN_ROUTER_PREDICTED_TTL_SECS", value_name = "SECONDS",
          value_parser = values::seconds)]
    pub(crate) router_predicted_ttl_secs: Option<f64>,
    /// Queue above this fraction of max_num_batched_tokens in prefill, or None.
    #[arg(long, env = "DYN_ROUTER_QUEUE_THRESHOLD", value_name = "FRACTION",
          value_parser = |text: &str| values::nullable(text, values::non_negative))]
    pub(crate) router_queue_threshold: Option<Nullable<f64>>,
    /// Order of the queue.
    #[arg(long, env = "DYN_ROUTER_QUEUE_POLICY", default_value = "fcfs",
          value_parser = ["fcfs", "wspt"])]
    pub(crate) router_queue_policy: String,
    /// Policy instance for prefill workers.
    #[arg(long, env = "DYN_ROUTER_PREFILL_POLICY")]
    pub(crate) router_prefill_policy: Option<String>,
    /// Policy instance for decode workers.
    #[arg(long, env = "DYN_ROUTER_DECODE_POLICY")]
    pub(crate) router_decode_policy: Option<String>,
    /// Threads of the KV index.
    #[arg(long, env = "DYN_ROUTER_EVENT_THREADS", default_value = "4",
          value_parser = |text: &str| values::whole(text, 1, U32))]
    pub(crate) router_event_threads: u32,
    /// Credit for a prefix in the shared cache, 0 to 1.
    #[arg(long, env = "DYN_SHARED_CACHE_MULTIPLIER", value_name = "CREDIT",
          value_parser = values::fraction)]
    pub(crate) shared_cache_multiplier: Option<f64>,
    /// Shared cache to ask.
    #[arg(long, env = "DYN_SHARED_CACHE_TYPE", default_value = "none",
          value_parser = ["none", "hicache"])]
    pub(crate) shared_cache_type: String,
    /// Settings of conditional disaggregation: policy, eff_isl_threshold,
    /// eff_isl_ratio_threshold, prefill_busy_threshold, decode_busy_threshold.
    #[arg(long, env = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG", value_name = "JSON",
          value_parser = values::conditional_disagg)]
    pub(crate) router_conditional_disagg_config: Option<ConditionalDisagg>,
}

switches! {
    /// The KV router's switches.
    KvSwitches, "KV router", {
        /// Route by load alone: a preset, implies --router-mode kv.
        load_aware / no_load_aware, "DYN_ROUTER_LOAD_AWARE" = "false";
        /// Learn from KV events what workers hold; else predict it.
        router_kv_events / no_router_kv_events, "DYN_ROUTER_USE_KV_EVENTS" = "true",
            formerly "kv-events" / "no-kv-events";
        /// Share running requests with other routers.
        router_replica_sync / no_router_replica_sync, "DYN_ROUTER_REPLICA_SYNC" = "false";
        /// Count the blocks of running requests.
        router_track_active_blocks / no_router_track_active_blocks,
            "DYN_ROUTER_TRACK_ACTIVE_BLOCKS" = "true",
            formerly "track-active-blocks" / "no-track-active-blocks";
        /// Count output blocks too.
        router_track_output_blocks / no_router_track_output_blocks,
            "DYN_ROUTER_TRACK_OUTPUT_BLOCKS" = "false",
            formerly "track-output-blocks" / "no-track-output-blocks";
        /// Assume that equal prompt blocks are shared.
        router_assume_kv_reuse / no_router_assume_kv_reuse,
            "DYN_ROUTER_ASSUME_KV_REUSE" = "true",
            formerly "assume-kv-reuse" / "no-assume-kv-reuse";
        /// Count prompt tokens as load.
        router_track_prefill_tokens / no_router_track_prefill_tokens,
            "DYN_ROUTER_TRACK_PREFILL_TOKENS" = "true";
        /// Let a request skip the prefill worker when its decode worker can prefill as well.
        router_conditional_disagg / no_router_conditional_disagg,
            "DYN_ROUTER_CONDITIONAL_DISAGG" = "false";
        /// Serve this frontend's KV index to others.
        serve_indexer / no_serve_indexer, "DYN_SERVE_INDEXER" = "false";
        /// Ask a served KV index in place of an own one.
        use_remote_indexer / no_use_remote_indexer, "DYN_USE_REMOTE_INDEXER" = "false";
        /// Keep an index of session prefixes.
        enable_session_prefix_index / no_enable_session_prefix_index,
            "DYN_ENABLE_SESSION_PREFIX_INDEX" = "false";
    }
}

/// Certificates.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "TLS")]
pub(crate) struct TlsOptions {
    /// HTTP certificate, PEM.
    #[arg(long, env = "DYN_TLS_CERT_PATH", value_name = "FILE")]
    pub(crate) tls_cert_path: Option<PathBuf>,
    /// HTTP key, PEM.
    #[arg(long, env = "DYN_TLS_KEY_PATH", value_name = "FILE")]
    pub(crate) tls_key_path: Option<PathBuf>,
    /// CA of HTTP clients, PEM.
    #[arg(long, env = "DYN_TLS_CLIENT_CA_CERT_PATH", value_name = "FILE")]
    pub(crate) tls_client_ca_cert_path: Option<PathBuf>,
    /// TCP plane: server certificate.
    #[arg(long, env = "DYN_TCP_TLS_CERT_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_cert_path: Option<PathBuf>,
    /// TCP plane: server key.
    #[arg(long, env = "DYN_TCP_TLS_KEY_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_key_path: Option<PathBuf>,
    /// TCP plane: CA of the peer.
    #[arg(long, env = "DYN_TCP_TLS_CA_CERT_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_ca_cert_path: Option<PathBuf>,
    /// TCP plane: client certificate.
    #[arg(long, env = "DYN_TCP_TLS_CLIENT_CERT_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_client_cert_path: Option<PathBuf>,
    /// TCP plane: client key.
    #[arg(long, env = "DYN_TCP_TLS_CLIENT_KEY_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_client_key_path: Option<PathBuf>,
    /// TCP plane: CA of clients.
    #[arg(long, env = "DYN_TCP_TLS_CLIENT_CA_CERT_PATH", value_name = "FILE")]
    pub(crate) tcp_tls_client_ca_cert_path: Option<PathBuf>,
    /// NATS: CA of the server.
    #[arg(long, env = "NATS_TLS_CA_CERT_PATH", value_name = "FILE")]
    pub(crate) nats_tls_ca_cert_path: Option<PathBuf>,
    /// NATS: client certificate.
    #[arg(long, env = "NATS_TLS_CLIENT_CERT_PATH", value_name = "FILE")]
    pub(crate) nats_tls_client_cert_path: Option<PathBuf>,
    /// NATS: client key.
    #[arg(long, env = "NATS_TLS_CLIENT_KEY_PATH", value_name = "FILE")]
    pub(crate) nats_tls_client_key_path: Option<PathBuf>,
}

switches! {
    /// TLS switches.
    TlsSwitches, "TLS", {
        /// NATS: do not verify the server. For development only.
        nats_tls_insecure / no_nats_tls_insecure, "NATS_TLS_INSECURE" = "false";
    }
}

/// Options that Dynamo itself accepts and ignores.
#[derive(Debug, Clone, Args)]
pub(crate) struct IgnoredOptions {
    /// Removed in Dynamo; see the --active-... thresholds.
    #[arg(long, env = "DYN_ADMISSION_CONTROL", hide = true)]
    pub(crate) admission_control: Option<String>,
}

switches! {
    /// Switches that Dynamo itself accepts and ignores.
    IgnoredSwitches, "Ignored", {
        /// Without effect in Dynamo; the topology comes from the workers.
        enforce_disagg / no_enforce_disagg, "DYN_ENFORCE_DISAGG" = "false";
    }
}

/// Reads the command line `argv` (program name first) over the variables of the process.
pub(crate) fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Options, Stop> {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let mut command = command();
    if let Some(line) = not_unicode(&command) {
        return Err(Stop::Refuse(Refusal(line)));
    }
    let read = command
        .try_get_matches_from_mut(&argv)
        .and_then(|matches| from_matches(&matches));
    read.map_err(|error| stop(error, &command, &argv))
}

fn from_matches(matches: &ArgMatches) -> Result<Options, clap::Error> {
    let mut options = Options::from_arg_matches(matches)?;
    options.api_switches.settle(matches);
    options.kv_switches.settle(matches);
    options.tls_switches.settle(matches);
    options.ignored_switches.settle(matches);
    options.kv.weight_is_of_variable = matches.value_source("router_decode_overlap_score_weight")
        == Some(ValueSource::EnvVariable);
    Ok(options)
}

fn command() -> Command {
    // A number may start with `-`, so that its own rule refuses it and not an unknown option.
    let numbers = [
        TypeId::of::<f64>(),
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<Nullable<f64>>(),
        TypeId::of::<Nullable<u64>>(),
    ];
    let mut command = Options::command().mut_args(|arg| {
        let kind = arg.get_value_parser().type_id();
        let number = numbers.iter().any(|number| kind == *number);
        if number {
            arg.allow_hyphen_values(true)
        } else {
            arg
        }
    });
    // As Python's frontend: the second variable counts only where the first is missing.
    if std::env::var_os("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT").is_none() {
        command = command.mut_arg("router_kv_overlap_score_weight", |arg| {
            arg.env("DYN_OVERLAP_SCORE_WEIGHT")
        });
    }
    command
}

/// A variable of ours whose value is no text.
fn not_unicode(command: &Command) -> Option<String> {
    command.get_arguments().find_map(|arg| {
        let name = arg.get_env()?.to_str()?;
        let value = std::env::var_os(name)?;
        let readable = value.to_str().is_some();
        (!readable).then(|| format!("{name} must be valid unicode, got {value:?}"))
    })
}

fn stop(error: clap::Error, command: &Command, argv: &[OsString]) -> Stop {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Stop::Show(error),
        _ => Stop::Refuse(Refusal(explain(&error, command, argv))),
    }
}

/// One line in place of clap's paragraph, which names the option even if the variable is wrong.
fn explain(error: &clap::Error, command: &Command, argv: &[OsString]) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    // As clap writes it: `--http-port <HTTP_PORT>`.
    let shown = text(ContextKind::InvalidArg);
    let name = shown.split([' ', '=']).next().unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownArgument => unsupported::refusal(name).unwrap_or_else(|| {
            let hint = match text(ContextKind::SuggestedArg) {
                "" => "see --help".to_owned(),
                similar => format!("did you mean {similar}?"),
            };
            format!("{name} is not an option of this program; {hint}")
        }),
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let rule = match (
                std::error::Error::source(error),
                error.get(ContextKind::ValidValue),
            ) {
                (Some(rule), _) => rule.to_string(),
                (None, Some(ContextValue::Strings(valid))) if !valid.is_empty() => {
                    format!("must be one of {}", valid.join(", "))
                }
                _ => "needs a value".to_owned(),
            };
            let value = text(ContextKind::InvalidValue);
            format!("{} {rule}, got {value:?}", source(name, command, argv))
        }
        _ => {
            let rendered = error.to_string();
            let line = rendered.lines().next().unwrap_or_default();
            line.trim_start_matches("error: ").to_owned()
        }
    }
}

/// Who gave the value of option `name`: the option as it was spelled, or its variable.
fn source(name: &str, command: &Command, argv: &[OsString]) -> String {
    let Some(arg) = command.get_arguments().find(|arg| {
        arg.get_long()
            .is_some_and(|long| name.strip_prefix("--") == Some(long))
    }) else {
        return name.to_owned();
    };
    let mut names = vec![name.to_owned()];
    for alias in arg.get_aliases().unwrap_or_default() {
        names.push(format!("--{alias}"));
    }
    let spelled = argv.iter().rev().find_map(|given| {
        let given = given.to_str()?;
        let given = given.split_once('=').map_or(given, |(option, _)| option);
        names.iter().find(|name| *name == given)
    });
    match (spelled, arg.get_env()) {
        (Some(option), _) => option.clone(),
        (None, Some(variable)) => variable.to_string_lossy().into_owned(),
        (None, None) => name.to_owned(),
    }
}
