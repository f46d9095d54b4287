// SPDX-License-Identifier: Apache-2.0

//! From options to Dynamo's own configuration, with the checks of Python's frontend.
//!
//! The only thing read here is the policy YAML; the environment is read in [`crate::options`].

use std::ffi::OsString;

use dynamo_kv_router::WorkerType;
use dynamo_kv_router::config::{DYN_ROUTER_MIN_INITIAL_WORKERS, KvRouterConfig, SharedCacheType};
use dynamo_kv_router::plugins::RouterPluginRegistry;
use dynamo_llm::discovery::LoadThresholdConfig;
use dynamo_llm::entrypoint::RouterConfig;
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_llm::local_model::runtime_config::{ModelRuntimeConfig, TokenizerBackend};
use dynamo_runtime::distributed::DistributedConfig;
use dynamo_runtime::pipeline::RouterMode;
use dynamo_runtime::pipeline::network::ResponsePlaneMode;

use crate::options::{Mode, Options, PlaneOptions, Refusal};
use crate::values::ConditionalDisagg;

#[cfg(test)]
mod tests;

/// Type of the policy that has the decode overlap weight among its parameters.
const DEFAULT_POLICY: &str = "dynamo-default-cost-fn";

/// Dynamo's settings of the model and of HTTP, routing among them.
pub(crate) fn local_model(options: &Options) -> Result<LocalModelBuilder, Refusal> {
    check_tls(options)?;
    let http = &options.http;
    let mut model = LocalModelBuilder::default();
    model
        .http_host(Some(http.http_host.clone()))
        .http_port(http.http_port)
        .namespace(not_empty(&http.namespace))
        .namespace_prefix(not_empty(&http.namespace_prefix))
        .migration_limit(Some(http.migration_limit))
        .migration_max_seq_len(http.migration_max_seq_len)
        .kv_cache_block_size(options.router.kv_cache_block_size)
        .http_metrics_port(
            (options.api_switches.kserve_grpc_server() && http.grpc_metrics_port != 0)
                .then_some(http.grpc_metrics_port),
        )
        .router_config(Some(router(options)?))
        .tls_cert_path(options.tls.tls_cert_path.clone())
        .tls_key_path(options.tls.tls_key_path.clone())
        .tls_client_ca_cert_path(options.tls.tls_client_ca_cert_path.clone());

    // Without a prefix of ours Dynamo's default stands, as in Python's frontend.
    let prefix = http.metrics_prefix.as_deref().map(str::trim);
    model.metrics_prefix(
        prefix
            .filter(|prefix| !prefix.is_empty())
            .and(http.metrics_prefix.clone()),
    );

    let api = &options.api;
    let switches = &options.api_switches;
    let tokenizer: TokenizerBackend = dynamo(&api.tokenizer)?;
    model
        .runtime_config(ModelRuntimeConfig {
            tokenizer_fallback_enabled: Some(switches.tokenizer_fallback()),
            ..ModelRuntimeConfig::default()
        })
        .tokenizer_backend(Some(tokenizer))
        .reasoning_field(dynamo(&api.reasoning_field_name)?)
        .enable_anthropic_api(switches.enable_anthropic_api())
        .strip_anthropic_preamble(switches.strip_anthropic_preamble())
        .enable_streaming_tool_dispatch(switches.enable_streaming_tool_dispatch())
        .enable_streaming_reasoning_dispatch(switches.enable_streaming_reasoning_dispatch());

    let path = http.model_path.as_ref();
    model.model_name(
        http.model_name
            .clone()
            .or_else(|| path.map(|path| path.display().to_string())),
    );
    if let Some(path) = path {
        if !path.is_dir() {
            return Err(refuse(format!(
                "--model-path must be a folder on disk, got {path:?}"
            )));
        }
        model.model_path(path.clone());
    }
    Ok(model)
}

/// Dynamo's settings of routing.
pub(crate) fn router(options: &Options) -> Result<RouterConfig, Refusal> {
    let router_options = &options.router;
    let mode = effective_mode(options);
    let kv = kv_router(options)?;
    check_mode(mode, &kv, options)?;
    let thresholds = LoadThresholdConfig {
        active_decode_blocks_threshold: router_options
            .active_decode_blocks_threshold
            .and_then(|threshold| threshold.0),
        active_prefill_tokens_threshold: router_options
            .active_prefill_tokens_threshold
            .and_then(|threshold| threshold.0),
        active_prefill_tokens_threshold_frac: router_options
            .active_prefill_tokens_threshold_frac
            .and_then(|threshold| threshold.0),
    };
    // Only KV routing reads the KV router's settings.
    let kv = if mode == Mode::Kv {
        kv
    } else {
        KvRouterConfig::default()
    };
    let mut config =
        RouterConfig::new(router_mode(mode), kv).with_load_threshold_config(thresholds);
    config.session_affinity_ttl_secs = router_options.router_session_affinity_ttl_secs;
    config.session_affinity_mode = dynamo(&router_options.router_session_affinity_mode)?;
    Ok(config)
}

/// Dynamo's settings of the KV router: options, then the preset, then the `router` section of the
/// policy YAML, each over the one before. The decode overlap weight comes last: there the option
/// beats the YAML.
pub(crate) fn kv_router(options: &Options) -> Result<KvRouterConfig, Refusal> {
    let kv = &options.kv;
    let switches = &options.kv_switches;
    let disagg = conditional_disagg(options)?;
    let mut config = KvRouterConfig {
        overlap_score_credit: kv.router_kv_overlap_score_credit,
        overlap_score_credit_decay: kv.router_kv_overlap_score_credit_decay,
        prefill_load_scale: kv.router_prefill_load_scale,
        decode_active_request_weight: kv.router_decode_active_request_weight,
        host_cache_hit_weight: kv.router_host_cache_hit_weight,
        disk_cache_hit_weight: kv.router_disk_cache_hit_weight,
        router_temperature: kv.router_temperature,
        use_kv_events: switches.router_kv_events(),
        router_replica_sync: switches.router_replica_sync(),
        router_track_active_blocks: switches.router_track_active_blocks(),
        router_track_output_blocks: switches.router_track_output_blocks(),
        router_assume_kv_reuse: switches.router_assume_kv_reuse(),
        router_track_prefill_tokens: switches.router_track_prefill_tokens(),
        router_tracking_hash: dynamo(&kv.router_tracking_hash)?,
        router_tracking_key_file: kv.router_tracking_key_file.clone(),
        router_tracking_key_id: kv.router_tracking_key_id.clone(),
        router_prefill_load_model: dynamo(&kv.router_prefill_load_model)?,
        router_ttl_secs: kv.router_ttl_secs,
        router_approximate_cache_policy: dynamo(&kv.router_approximate_cache_policy)?,
        router_queue_threshold: kv.router_queue_threshold.and_then(|threshold| threshold.0),
        router_policy_config: kv.router_policy_config.clone(),
        router_prefill_policy: kv.router_prefill_policy.clone(),
        router_decode_policy: kv.router_decode_policy.clone(),
        router_event_threads: kv.router_event_threads,
        router_queue_policy: dynamo(&kv.router_queue_policy)?,
        use_remote_indexer: switches.use_remote_indexer(),
        serve_indexer: switches.serve_indexer(),
        enable_session_prefix_index: switches.enable_session_prefix_index(),
        shared_cache_multiplier: kv.shared_cache_multiplier,
        shared_cache_type: dynamo(&kv.shared_cache_type)?,
        router_predicted_ttl_secs: kv.router_predicted_ttl_secs,
        conditional_disagg_enabled: switches.router_conditional_disagg(),
        conditional_disagg_policy: disagg.policy,
        conditional_disagg_eff_isl_threshold: disagg.eff_isl_threshold,
        conditional_disagg_eff_isl_ratio_threshold: disagg.eff_isl_ratio_threshold,
        conditional_disagg_prefill_busy_threshold: disagg.prefill_busy_threshold,
        conditional_disagg_decode_busy_threshold: disagg.decode_busy_threshold,
        ..KvRouterConfig::default()
    };
    if let Some(weight) = kv.router_kv_overlap_score_weight {
        dynamo_kv_router::config::apply_deprecated_overlap_score_weight_override(
            weight,
            &mut config.overlap_score_credit,
            &mut config.prefill_load_scale,
        );
    }
    if switches.load_aware() {
        load_aware(&mut config);
    }
    config.apply_policy_config().map_err(refuse)?;
    apply_decode_overlap(&mut config, kv.router_decode_overlap_score_weight)?;
    if config.router_prefill_load_model.is_enabled() {
        return Err(refuse(
            "--router-prefill-load-model=ais needs AISimulate, which only Dynamo's Python \
             frontend can load",
        ));
    }
    config.validate().map_err(refuse)?;
    Ok(config)
}

/// The policies that Dynamo ships, by the names that a policy YAML uses, after the policies of this
/// configuration were made from them once: Dynamo would do so when the first worker appears.
pub(crate) fn policies(options: &Options) -> Result<RouterPluginRegistry, Refusal> {
    let mut policies = dynamo_custom_policy_builtin::default_registry();
    dynamo_custom_policy_builtin::register(&mut policies).map_err(refuse)?;
    policies.resolve(&kv_router(options)?).map_err(|error| {
        let file = options.kv.router_policy_config.as_deref();
        refuse(format!("{}: {error}", file.unwrap_or("worker selection")))
    })?;
    Ok(policies)
}

/// Sets the weight of the prefix that a decode worker holds already.
///
/// `None` leaves what the policy YAML says. The field exists in patched Dynamo only, so without
/// `cfg(kvdelta_patched)` (see `build.rs`) every weight but 0 is refused.
pub(crate) fn apply_decode_overlap(
    #[cfg_attr(not(kvdelta_patched), expect(unused_variables))] config: &mut KvRouterConfig,
    weight: Option<f64>,
) -> Result<(), Refusal> {
    #[cfg(kvdelta_patched)]
    if let Some(weight) = weight {
        config.decode_overlap_score_weight = weight.into();
    }
    #[cfg(not(kvdelta_patched))]
    if let Some(weight) = weight.filter(|weight| *weight > 0.0) {
        return Err(refuse(format!(
            "--router-decode-overlap-score-weight (DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT) cannot \
             be {weight}: this frontend was built from unpatched Dynamo sources"
        )));
    }
    Ok(())
}

/// The weight that this frontend routes by, and who gave it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecodeOverlap {
    /// The weight; 0 is off.
    pub(crate) weight: f64,
    /// Option, variable or file.
    pub(crate) source: String,
}

/// The weight of the cached prefix for decode workers whose model card has none of its own.
pub(crate) fn decode_overlap(options: &Options) -> Result<DecodeOverlap, Refusal> {
    let found = |weight, source: &str| {
        Ok(DecodeOverlap {
            weight,
            source: source.to_owned(),
        })
    };
    if effective_mode(options) != Mode::Kv {
        return found(0.0, "off without --router-mode=kv");
    }
    if let Some(weight) = options.kv.router_decode_overlap_score_weight {
        let source = if options.kv.weight_is_of_variable {
            "DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT"
        } else {
            "--router-decode-overlap-score-weight"
        };
        return found(weight, source);
    }
    let config = kv_router(options)?;
    let name = config
        .selected_worker_selection_policy_instance_for(WorkerType::Decode)
        .map_err(refuse)?;
    let selection = config.worker_selection_config().map_err(refuse)?;
    let instance = selection
        .zip(name)
        .and_then(|(selection, name)| selection.instance(&name));
    let weight = instance
        .filter(|instance| instance.policy_type() == DEFAULT_POLICY)
        .and_then(|instance| {
            instance
                .parameters()
                .get("decode_overlap_score_weight")?
                .as_f64()
        });
    match (weight, &options.kv.router_policy_config) {
        (Some(weight), Some(file)) => found(weight, file),
        _ => found(0.0, "not set"),
    }
}

/// Dynamo's settings of discovery and transports. Reads DYN_FILE_KV and the variables of etcd.
pub(crate) fn distributed(planes: &PlaneOptions) -> anyhow::Result<DistributedConfig> {
    let mut config = DistributedConfig::from_settings_with_overrides(
        Some(&planes.discovery_backend),
        Some(&planes.request_plane),
        // Dynamo reads the empty text as its default.
        Some(planes.event_plane.as_deref().unwrap_or_default()),
    )?;
    config.response_plane = Some(match planes.response_plane.as_str() {
        "quic" => ResponsePlaneMode::Quic,
        _ => ResponsePlaneMode::Tcp,
    });
    Ok(config)
}

/// Variables to set (or, with `None`, to remove) before Dynamo starts: what it reads from the
/// environment only.
pub(crate) fn environment(options: &Options) -> Vec<(&'static str, Option<OsString>)> {
    let tls = &options.tls;
    let paths = [
        ("DYN_TCP_TLS_CERT_PATH", &tls.tcp_tls_cert_path),
        ("DYN_TCP_TLS_KEY_PATH", &tls.tcp_tls_key_path),
        ("DYN_TCP_TLS_CA_CERT_PATH", &tls.tcp_tls_ca_cert_path),
        (
            "DYN_TCP_TLS_CLIENT_CERT_PATH",
            &tls.tcp_tls_client_cert_path,
        ),
        ("DYN_TCP_TLS_CLIENT_KEY_PATH", &tls.tcp_tls_client_key_path),
        (
            "DYN_TCP_TLS_CLIENT_CA_CERT_PATH",
            &tls.tcp_tls_client_ca_cert_path,
        ),
        ("NATS_TLS_CA_CERT_PATH", &tls.nats_tls_ca_cert_path),
        ("NATS_TLS_CLIENT_CERT_PATH", &tls.nats_tls_client_cert_path),
        ("NATS_TLS_CLIENT_KEY_PATH", &tls.nats_tls_client_key_path),
    ];
    let mut variables: Vec<_> = paths
        .into_iter()
        .filter_map(|(name, path)| Some((name, Some(path.clone()?.into_os_string()))))
        .collect();
    variables.push((
        "NATS_TLS_INSECURE",
        options.tls_switches.nats_tls_insecure().then(|| "1".into()),
    ));
    variables.push((
        DYN_ROUTER_MIN_INITIAL_WORKERS,
        Some(options.router.router_min_initial_workers.to_string().into()),
    ));
    // The port is meant for workers; a frontend that inherits it would take it from them.
    variables.push(("DYN_SYSTEM_PORT", None));
    variables
}

/// What was asked for and has no effect in Dynamo either.
pub(crate) fn warnings(options: &Options) -> Vec<String> {
    let mut warnings = Vec::new();
    if options.ignored.admission_control.is_some() {
        warnings.push(
            "--admission-control (DYN_ADMISSION_CONTROL) has no effect in Dynamo 1.6; set the \
             --active-... thresholds"
                .to_owned(),
        );
    }
    if options.ignored_switches.enforce_disagg() {
        warnings.push(
            "--enforce-disagg (DYN_ENFORCE_DISAGG) has no effect in Dynamo 1.6; the topology comes \
             from the registered workers"
                .to_owned(),
        );
    }
    if options.kv.router_policy_config.is_some() && effective_mode(options) != Mode::Kv {
        warnings.push(
            "--router-policy-config (DYN_ROUTER_POLICY_CONFIG) has no effect without \
             --router-mode=kv"
                .to_owned(),
        );
    }
    warnings
}

fn conditional_disagg(options: &Options) -> Result<ConditionalDisagg, Refusal> {
    match &options.kv.router_conditional_disagg_config {
        Some(_) if !options.kv_switches.router_conditional_disagg() => Err(refuse(
            "--router-conditional-disagg-config requires --router-conditional-disagg",
        )),
        Some(config) => Ok(config.clone()),
        None => Ok(ConditionalDisagg::default()),
    }
}

/// The preset of `--load-aware`, value by value that of Python's frontend.
fn load_aware(config: &mut KvRouterConfig) {
    config.overlap_score_credit = 0.0;
    config.use_kv_events = false;
    config.router_track_active_blocks = true;
    config.router_assume_kv_reuse = false;
    config.router_track_prefill_tokens = true;
    config.use_remote_indexer = false;
    config.serve_indexer = false;
    config.shared_cache_multiplier = Some(0.0);
    config.shared_cache_type = SharedCacheType::None;
    config.router_predicted_ttl_secs = None;
}

fn check_mode(mode: Mode, kv: &KvRouterConfig, options: &Options) -> Result<(), Refusal> {
    let overlap = options.kv.router_decode_overlap_score_weight;
    if mode != Mode::Kv {
        for (wanted, flag) in [
            (kv.serve_indexer, "--serve-indexer"),
            (kv.conditional_disagg_enabled, "--router-conditional-disagg"),
            (
                overlap.is_some_and(|weight| weight > 0.0),
                "--router-decode-overlap-score-weight",
            ),
        ] {
            if wanted {
                return Err(refuse(format!("{flag} requires --router-mode=kv")));
            }
        }
    }
    if kv.conditional_disagg_enabled && !kv.use_kv_events {
        return Err(refuse(
            "--router-conditional-disagg requires --router-kv-events",
        ));
    }
    if options.kv_switches.load_aware() {
        let DecodeOverlap { weight, source } = decode_overlap(options)?;
        if weight > 0.0 {
            return Err(refuse(format!(
                "{source} sets decode_overlap_score_weight to {weight}, which contradicts \
                 --load-aware (DYN_ROUTER_LOAD_AWARE): set 0, or leave one of them out"
            )));
        }
    }
    Ok(())
}

fn check_tls(options: &Options) -> Result<(), Refusal> {
    let tls = &options.tls;
    let pair = (tls.tls_cert_path.is_some(), tls.tls_key_path.is_some());
    if pair.0 != pair.1 {
        return Err(refuse(
            "--tls-cert-path and --tls-key-path must be provided together",
        ));
    }
    if tls.tls_client_ca_cert_path.is_some() && !pair.0 {
        return Err(refuse(
            "--tls-client-ca-cert-path requires --tls-cert-path and --tls-key-path",
        ));
    }
    Ok(())
}

/// The mode that this frontend routes by: `--load-aware` is the KV router.
pub(crate) fn effective_mode(options: &Options) -> Mode {
    if options.kv_switches.load_aware() {
        Mode::Kv
    } else {
        options.router.router_mode
    }
}

fn router_mode(mode: Mode) -> RouterMode {
    match mode {
        Mode::RoundRobin => RouterMode::RoundRobin,
        Mode::Random => RouterMode::Random,
        Mode::PowerOfTwo => RouterMode::PowerOfTwoChoices,
        Mode::Kv => RouterMode::KV,
        Mode::Direct => RouterMode::Direct,
        Mode::LeastLoaded => RouterMode::LeastLoaded,
        Mode::DeviceAwareWeighted => RouterMode::DeviceAwareWeighted,
    }
}

/// A word that the command line let through, in Dynamo's type.
fn dynamo<T: std::str::FromStr>(word: &str) -> Result<T, Refusal>
where
    T::Err: std::fmt::Display,
{
    word.parse().map_err(refuse)
}

fn not_empty(text: &Option<String>) -> Option<String> {
    text.clone().filter(|text| !text.is_empty())
}

fn refuse(reason: impl std::fmt::Display) -> Refusal {
    Refusal(reason.to_string())
}
