// SPDX-License-Identifier: Apache-2.0

//! Model cards: their bytes and checksums, and what another build makes of them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use dynamo_kv_router::{ConditionalDisaggPolicyKind, KvRouterConfig, RouterQueuePolicy};
use dynamo_kv_router::{RouterConfigOverride, SharedCacheType};
use dynamo_llm::entrypoint::RouterConfig;
use dynamo_llm::model_card::ModelDeploymentCard;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::pipeline::RouterMode;
use kvdelta_recorder::settings::Settings;
use serde_json::json;

use crate::names::Names;
use crate::record::Record;

/// Records cards of the model and writes each to a file of `cards`.
pub(crate) fn write(
    settings: &Settings,
    model: &Path,
    cards: &Path,
    record: &mut Record,
) -> Result<()> {
    fs::create_dir_all(cards).with_context(|| format!("cannot make {}", cards.display()))?;
    let mut names = Names::default();
    names.text(model.display().to_string(), "model");
    record.bytes(
        "setting",
        serde_json::to_string(&RouterConfigOverride::default())?,
    )?;
    let configurations = configurations(settings);
    for router in configurations
        .iter()
        .filter_map(|(_, router)| router.as_ref())
    {
        let json = serde_json::to_string(router)?;
        record.bytes("setting", names.in_text(&json))?;
    }
    for worker_type in [
        None,
        Some(WorkerType::Aggregated),
        Some(WorkerType::Prefill),
        Some(WorkerType::Decode),
    ] {
        for (name, router) in &configurations {
            let mut card = ModelDeploymentCard::load_from_disk(model, None)?;
            card.set_name("recorded");
            // The checksum covers the path, which must not differ between machines.
            card.source_path = Some("recorded".to_owned());
            card.kv_cache_block_size = 16;
            card.worker_type = worker_type;
            card.router_config = router.clone();
            let json = card.to_json()?;
            let role = worker_type.map_or("none", |role| role.as_str());
            fs::write(cards.join(format!("{role}-{name}.json")), &json)?;
            record.line("checksum", json!([role, name, card.mdcsum()]))?;
            record.bytes("card", names.in_text(&json))?;
        }
    }
    Ok(())
}

/// Router configurations that a card may carry.
fn configurations(settings: &Settings) -> Vec<(&'static str, Option<RouterConfig>)> {
    let kv = |config| Some(RouterConfig::new(RouterMode::KV, config));
    let mut full = RouterConfig::new(RouterMode::KV, full(settings.config()));
    full.session_affinity_ttl_secs = Some(60);
    vec![
        ("absent", None),
        ("default", kv(settings.config())),
        ("full", Some(full)),
        (
            "conditional",
            kv(KvRouterConfig {
                conditional_disagg_enabled: true,
                ..settings.config()
            }),
        ),
    ]
}

/// A configuration in which many settings are not the default ones.
fn full(config: KvRouterConfig) -> KvRouterConfig {
    KvRouterConfig {
        overlap_score_credit: 0.5,
        overlap_score_credit_decay: 0.25,
        prefill_load_scale: 1.5,
        decode_active_request_weight: 0.75,
        host_cache_hit_weight: 0.5,
        disk_cache_hit_weight: 0.125,
        router_temperature: 0.5,
        router_replica_sync: true,
        router_track_output_blocks: true,
        router_assume_kv_reuse: false,
        router_track_prefill_tokens: false,
        router_ttl_secs: 60.0,
        router_queue_threshold: Some(2.0),
        router_event_threads: 2,
        skip_initial_worker_wait: true,
        router_queue_policy: RouterQueuePolicy::Wspt,
        serve_indexer: true,
        shared_cache_multiplier: Some(0.25),
        shared_cache_type: SharedCacheType::Hicache,
        router_predicted_ttl_secs: Some(3.0),
        conditional_disagg_enabled: true,
        conditional_disagg_policy: ConditionalDisaggPolicyKind::default(),
        conditional_disagg_eff_isl_threshold: 100,
        conditional_disagg_eff_isl_ratio_threshold: 0.5,
        conditional_disagg_prefill_busy_threshold: Some(0.5),
        conditional_disagg_decode_busy_threshold: Some(0.75),
        ..config
    }
}

/// Reads every card of the folder and records its checksum and its bytes as written again, or why
/// it was refused.
pub(crate) fn read(cards: &Path, record: &mut Record) -> Result<()> {
    let mut paths = fs::read_dir(cards)
        .with_context(|| format!("cannot read {}", cards.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let text = fs::read_to_string(&path)?;
        match serde_json::from_str::<ModelDeploymentCard>(&text) {
            Ok(card) => {
                let same = card.to_json()? == text;
                record.line("read", json!([name, card.mdcsum(), same]))?;
            }
            Err(error) => record.line("refused", json!([name, error.to_string()]))?,
        }
    }
    Ok(())
}
