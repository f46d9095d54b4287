// SPDX-License-Identifier: Apache-2.0

use std::io::Write;

use dynamo_kv_router::config::RouterQueuePolicy;
use dynamo_kv_router::{ConditionalDisaggPolicyKind, TrackingHashAlgorithm};
use dynamo_llm::session_affinity::SessionAffinityMode;

use super::*;
use crate::options::{self, Stop};

fn options(args: &[&str]) -> Options {
    let argv = std::iter::once("kvdelta-frontend").chain(args.iter().copied());
    match options::parse(argv.map(OsString::from)) {
        Ok(options) => options,
        Err(Stop::Refuse(reason)) => panic!("{args:?}: {reason}"),
        Err(Stop::Show(text)) => panic!("{args:?}: {text}"),
    }
}

fn refused(args: &[&str]) -> String {
    refused_with(&options(args))
}

fn refused_with(options: &Options) -> String {
    match local_model(options) {
        Ok(_) => panic!("{options:?} was accepted"),
        Err(reason) => reason.to_string(),
    }
}

fn policy(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("file");
    file.write_all(text.as_bytes()).expect("written");
    file
}

#[test]
fn without_options_the_kv_router_is_dynamos_default() {
    let ours = kv_router(&options(&[])).expect("config");
    let theirs = KvRouterConfig::default();
    // Debug shows the fields that do not travel in model cards too.
    assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
}

#[test]
fn every_kv_option_reaches_its_field() {
    let config = kv_router(&options(&[
        "--router-kv-overlap-score-credit=2",
        "--router-kv-overlap-score-credit-decay=0.5",
        "--router-prefill-load-scale=3",
        "--router-decode-active-request-weight=4",
        "--router-host-cache-hit-weight=0.1",
        "--router-disk-cache-hit-weight=0.2",
        "--router-temperature=0.3",
        "--router-replica-sync",
        "--router-track-output-blocks",
        "--no-router-assume-kv-reuse",
        "--no-router-track-prefill-tokens",
        "--router-tracking-hash=keyed-xxh3-v1",
        "--router-tracking-key-file=/k",
        "--router-tracking-key-id=e1",
        "--router-ttl-secs=7",
        "--router-queue-threshold=0.8",
        "--router-prefill-policy=default",
        "--router-decode-policy=default",
        "--router-event-threads=2",
        "--router-queue-policy=wspt",
        "--serve-indexer",
        "--enable-session-prefix-index",
        "--shared-cache-multiplier=0.4",
        "--shared-cache-type=hicache",
        "--router-predicted-ttl-secs=9",
        "--router-conditional-disagg",
        r#"--router-conditional-disagg-config={"policy":"isl_or_load","eff_isl_threshold":5,"eff_isl_ratio_threshold":0.6,"decode_busy_threshold":0.7}"#,
    ]))
    .expect("config");
    assert_eq!(config.overlap_score_credit, 2.0);
    assert_eq!(config.overlap_score_credit_decay, 0.5);
    assert_eq!(config.prefill_load_scale, 3.0);
    assert_eq!(config.decode_active_request_weight, 4.0);
    assert_eq!(config.host_cache_hit_weight, 0.1);
    assert_eq!(config.disk_cache_hit_weight, 0.2);
    assert_eq!(config.router_temperature, 0.3);
    assert!(config.use_kv_events && config.router_replica_sync);
    assert!(config.router_track_active_blocks && config.router_track_output_blocks);
    assert!(!config.router_assume_kv_reuse && !config.router_track_prefill_tokens);
    assert_eq!(
        config.router_tracking_hash,
        TrackingHashAlgorithm::KeyedXxh3V1
    );
    assert_eq!(config.router_tracking_key_file, Some("/k".into()));
    assert_eq!(config.router_tracking_key_id.as_deref(), Some("e1"));
    assert_eq!(config.router_ttl_secs, 7.0);
    assert_eq!(config.router_queue_threshold, Some(0.8));
    assert_eq!(config.router_prefill_policy.as_deref(), Some("default"));
    assert_eq!(config.router_decode_policy.as_deref(), Some("default"));
    assert_eq!(config.router_event_threads, 2);
    assert_eq!(config.router_queue_policy, RouterQueuePolicy::Wspt);
    assert!(config.serve_indexer && config.enable_session_prefix_index);
    assert_eq!(config.shared_cache_multiplier, Some(0.4));
    assert_eq!(config.shared_cache_type, SharedCacheType::Hicache);
    assert_eq!(config.router_predicted_ttl_secs, Some(9.0));
    assert!(config.conditional_disagg_enabled);
    assert_eq!(
        config.conditional_disagg_policy,
        ConditionalDisaggPolicyKind::IslOrLoad
    );
    assert_eq!(config.conditional_disagg_eff_isl_threshold, 5);
    assert_eq!(config.conditional_disagg_eff_isl_ratio_threshold, 0.6);
    assert_eq!(config.conditional_disagg_prefill_busy_threshold, None);
    assert_eq!(config.conditional_disagg_decode_busy_threshold, Some(0.7));
}

#[test]
fn the_older_weight_sets_scale_and_at_zero_credit() {
    let config = kv_router(&options(&["--kv-overlap-score-weight=2"])).expect("config");
    assert_eq!(
        (config.prefill_load_scale, config.overlap_score_credit),
        (2.0, 1.0)
    );
    let config = kv_router(&options(&["--kv-overlap-score-weight=0"])).expect("config");
    assert_eq!(
        (config.prefill_load_scale, config.overlap_score_credit),
        (0.0, 0.0)
    );
}

#[test]
fn load_aware_implies_kv_and_beats_other_options() {
    let config = router(&options(&["--load-aware", "--router-kv-events"])).expect("config");
    assert_eq!(config.router_mode, RouterMode::KV);
    let kv = config.kv_router_config;
    assert!(!kv.use_kv_events && !kv.router_assume_kv_reuse);
    assert_eq!(kv.overlap_score_credit, 0.0);
    assert_eq!(kv.shared_cache_multiplier, Some(0.0));
}

#[test]
fn the_policy_yaml_beats_options_and_is_checked() {
    let file = policy("router:\n  router_event_threads: 9\n");
    let path = file.path().to_str().expect("path");
    let args = ["--router-policy-config", path, "--router-event-threads=2"];
    let config = kv_router(&options(&args)).expect("config");
    assert_eq!(config.router_event_threads, 9);

    let file = policy("router:\n  no_such_setting: 1\n");
    let path = file.path().to_str().expect("path");
    assert!(refused(&["--router-policy-config", path]).contains("no_such_setting"));
    assert!(refused(&["--router-policy-config", "/no/such/file"]).contains("/no/such/file"));
}

#[test]
fn the_mode_decides_whether_kv_settings_count() {
    let config = router(&options(&["--router-temperature=1"])).expect("config");
    assert_eq!(config.router_mode, RouterMode::RoundRobin);
    assert_eq!(config.kv_router_config.router_temperature, 0.0);
    for (name, mode) in [
        ("random", RouterMode::Random),
        ("power-of-two", RouterMode::PowerOfTwoChoices),
        ("kv", RouterMode::KV),
        ("direct", RouterMode::Direct),
        ("least-loaded", RouterMode::LeastLoaded),
        ("device-aware-weighted", RouterMode::DeviceAwareWeighted),
    ] {
        let config = router(&options(&["--router-mode", name])).expect("config");
        assert_eq!(config.router_mode, mode, "{name}");
    }
}

#[test]
fn thresholds_and_affinity_reach_the_router() {
    let config = router(&options(&[
        "--active-decode-blocks-threshold=0.9",
        "--active-prefill-tokens-threshold=100",
        "--active-prefill-tokens-threshold-frac=None",
        "--router-session-affinity-ttl-secs=60",
        "--router-session-affinity-mode=soft",
    ]))
    .expect("config");
    let thresholds = config.load_threshold_config;
    assert_eq!(thresholds.active_decode_blocks_threshold, Some(0.9));
    assert_eq!(thresholds.active_prefill_tokens_threshold, Some(100));
    assert_eq!(thresholds.active_prefill_tokens_threshold_frac, None);
    assert_eq!(config.session_affinity_ttl_secs, Some(60));
    assert_eq!(config.session_affinity_mode, SessionAffinityMode::Soft);
}

#[test]
fn combinations_that_python_refuses_are_refused() {
    let busy = r#"--router-conditional-disagg-config={"policy":"prefill_load"}"#;
    let cases: [(&[&str], &str); 12] = [
        (&["--serve-indexer"], "--router-mode=kv"),
        (&["--router-conditional-disagg"], "--router-mode=kv"),
        (
            &[
                "--router-mode=kv",
                "--router-conditional-disagg",
                "--no-router-kv-events",
            ],
            "--router-kv-events",
        ),
        (
            &["--router-mode=kv", "--router-conditional-disagg-config={}"],
            "requires --router-conditional-disagg",
        ),
        (
            &["--router-mode=kv", "--router-conditional-disagg", busy],
            "prefill_busy_threshold",
        ),
        (
            &[
                "--router-mode=kv",
                "--serve-indexer",
                "--use-remote-indexer",
            ],
            "mutually exclusive",
        ),
        (
            &[
                "--router-mode=kv",
                "--router-track-output-blocks",
                "--no-router-track-active-blocks",
            ],
            "router_track_active_blocks",
        ),
        (&["--router-prefill-load-model=ais"], "AISimulate"),
        (&["--tls-cert-path=/c"], "provided together"),
        (&["--tls-key-path=/k"], "provided together"),
        (
            &["--tls-client-ca-cert-path=/c"],
            "requires --tls-cert-path",
        ),
        (&["--model-path=/no/such/folder"], "/no/such/folder"),
    ];
    for (args, part) in cases {
        let line = refused(args);
        assert!(line.contains(part), "{args:?}: {line}");
        assert_eq!(line.lines().count(), 1, "{line}");
    }
}

#[cfg(not(kvdelta_patched))]
#[test]
fn unpatched_dynamo_takes_no_decode_overlap_weight_but_zero() {
    let mut config = KvRouterConfig::default();
    assert_eq!(apply_decode_overlap(&mut config, None), Ok(()));
    assert_eq!(apply_decode_overlap(&mut config, Some(0.0)), Ok(()));
    let line = refused(&[
        "--router-mode=kv",
        "--router-decode-overlap-score-weight=0.5",
    ]);
    assert!(
        line.contains("built from unpatched Dynamo sources"),
        "{line}"
    );
    assert!(line.contains("0.5"), "{line}");
    assert_eq!(
        format!("{config:?}"),
        format!("{:?}", KvRouterConfig::default())
    );
}

#[cfg(kvdelta_patched)]
#[test]
fn the_decode_overlap_weight_reaches_patched_dynamo() {
    let config = kv_router(&options(&["--router-decode-overlap-score-weight=0.5"]));
    let expected = KvRouterConfig {
        decode_overlap_score_weight: 0.5.into(),
        ..KvRouterConfig::default()
    };
    assert_eq!(
        format!("{:?}", config.expect("config")),
        format!("{expected:?}")
    );
    let line = refused(&["--router-decode-overlap-score-weight=0.5"]);
    assert!(line.contains("--router-mode=kv"), "{line}");
}

#[tokio::test]
async fn http_options_reach_the_model() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().to_str().expect("path");
    assert!(local_model(&options(&["--model-path", path])).is_ok());

    let mut builder = local_model(&options(&[
        "--http-host=127.0.0.1",
        "--http-port=1234",
        "--namespace=",
        "--namespace-prefix=ns",
        "--metrics-prefix=mine",
        "--migration-limit=3",
        "--migration-max-seq-len=99",
        "--kv-cache-block-size=32",
        "--model-name= tiny ",
        "--enable-anthropic-api",
        "--no-strip-anthropic-preamble",
        "--reasoning-field-name=reasoning",
        "--tokenizer=fastokens",
        "--no-tokenizer-fallback",
    ]))
    .expect("model");
    let model = builder.build().await.expect("built");
    assert_eq!(model.http_host().as_deref(), Some("127.0.0.1"));
    assert_eq!(model.http_port(), 1234);
    assert_eq!(model.namespace(), None);
    assert_eq!(model.namespace_prefix(), Some("ns"));
    assert_eq!(model.metrics_prefix().as_deref(), Some("mine"));
    assert_eq!(model.migration_limit(), 3);
    assert_eq!(model.migration_max_seq_len(), Some(99));
    assert_eq!(model.card().kv_cache_block_size, 32);
    assert_eq!(model.display_name(), "tiny");
    assert!(model.enable_anthropic_api());
    assert!(!model.strip_anthropic_preamble());
    assert_eq!(model.reasoning_field().as_str(), "reasoning");
    let runtime = model.runtime_config();
    assert_eq!(runtime.tokenizer_backend, Some(TokenizerBackend::Fastokens));
    assert_eq!(runtime.tokenizer_fallback_enabled, Some(false));
}

#[test]
fn planes_come_from_the_options() {
    let options = options(&[
        "--discovery-backend=mem",
        "--request-plane=nats",
        "--response-plane=quic",
        "--event-plane=nats",
    ]);
    let config = distributed(&options.planes).expect("config");
    assert!(config.discovery_backend.is_local());
    assert!(config.request_plane.is_nats());
    assert_eq!(config.response_plane, Some(ResponsePlaneMode::Quic));
    assert!(config.nats_config.is_some());
}

#[test]
fn what_dynamo_reads_from_the_environment_is_handed_on() {
    let variables = environment(&options(&[
        "--tcp-tls-ca-cert-path=/ca",
        "--nats-tls-insecure",
        "--router-min-initial-workers=2",
    ]));
    let value = |name: &str| variables.iter().find(|(found, _)| *found == name).cloned();
    assert_eq!(
        value("DYN_TCP_TLS_CA_CERT_PATH"),
        Some(("DYN_TCP_TLS_CA_CERT_PATH", Some("/ca".into())))
    );
    assert_eq!(
        value("NATS_TLS_INSECURE"),
        Some(("NATS_TLS_INSECURE", Some("1".into())))
    );
    assert_eq!(
        value(DYN_ROUTER_MIN_INITIAL_WORKERS),
        Some((DYN_ROUTER_MIN_INITIAL_WORKERS, Some("2".into())))
    );
    assert_eq!(value("DYN_SYSTEM_PORT"), Some(("DYN_SYSTEM_PORT", None)));
    assert_eq!(value("DYN_TCP_TLS_CERT_PATH"), None);
}

#[test]
fn options_without_effect_warn() {
    assert!(warnings(&options(&[])).is_empty());
    assert_eq!(
        warnings(&options(&["--enforce-disagg", "--admission-control=none"])).len(),
        2
    );
    let file = "--router-policy-config=policy.yaml";
    assert_eq!(warnings(&options(&[file])).len(), 1);
    assert!(warnings(&options(&[file, "--router-mode=kv"])).is_empty());
}

#[cfg(kvdelta_patched)]
#[test]
fn a_bad_weight_in_the_policy_yaml_is_refused_with_file_key_and_value() {
    for (value, named) in [("1.5", None), ("-1", Some("-1")), ("high", Some("high"))] {
        let file = policy(&format!(
            "worker_selection:\n  decode: tuned\n  instances:\n    - name: tuned\n      \
             type: dynamo-default-cost-fn\n      parameters:\n        \
             decode_overlap_score_weight: {value}\n"
        ));
        let path = file.path().display().to_string();
        let options = options(&[
            "--router-mode=kv",
            &format!("--router-policy-config={path}"),
        ]);
        match (policies(&options), named) {
            (Ok(_), None) => (),
            (Err(Refusal(reason)), Some(value)) => {
                for part in [path.as_str(), "decode_overlap_score_weight", value] {
                    assert!(reason.contains(part), "{reason}");
                }
            }
            (result, _) => panic!("{value}: refused is {}", result.is_err()),
        }
    }
}

// Unpatched Dynamo refuses the weight itself.
#[cfg(kvdelta_patched)]
#[test]
fn the_decode_overlap_weight_contradicts_load_aware_routing() {
    let of_option = options(&["--load-aware", "--router-decode-overlap-score-weight=1.5"]);
    let mut of_variable = of_option.clone();
    of_variable.kv.weight_is_of_variable = true;
    let file = policy(
        "worker_selection:\n  decode: tuned\n  instances:\n    - name: tuned\n      \
         type: dynamo-default-cost-fn\n      parameters:\n        \
         decode_overlap_score_weight: 1.5\n",
    );
    let path = file.path().to_str().expect("path");
    let of_file = options(&["--load-aware", "--router-policy-config", path]);
    for (options, source) in [
        (of_option, "--router-decode-overlap-score-weight"),
        (of_variable, "DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT"),
        (of_file, path),
    ] {
        let reason = refused_with(&options);
        assert!(reason.starts_with(source), "{reason}");
        for part in ["1.5", "--load-aware"] {
            assert!(reason.contains(part), "{reason}");
        }
    }
    let zero = [
        "--load-aware",
        "--router-policy-config",
        path,
        "--router-decode-overlap-score-weight=0",
    ];
    assert!(
        local_model(&options(&zero)).is_ok(),
        "the option beats the file"
    );
}

#[test]
fn load_aware_routing_is_the_kv_router() {
    assert_eq!(effective_mode(&options(&["--load-aware"])), Mode::Kv);
    assert_eq!(
        effective_mode(&options(&["--load-aware", "--router-mode=random"])),
        Mode::Kv
    );
    assert_eq!(
        effective_mode(&options(&["--router-mode=random"])),
        Mode::Random
    );
}
