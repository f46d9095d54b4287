//! Which index a decode pool gets.

use std::env;

use dynamo_kv_router::WorkerType;
use dynamo_kv_router::config::KvRouterConfig;
use thiserror::Error;

/// Names the index of decode pools: `dynamo`, the default, or `kvdelta`.
///
/// A variable of the frontend's process and no field of the router's configuration: which index a
/// frontend keeps is nobody else's affair, and the configuration travels in model cards.
pub const DECODE_INDEX_VARIABLE: &str = "DYN_ROUTER_DECODE_INDEX";

/// The index of decode pools cannot be what the variable says.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BadDecodeIndex {
    /// It names none.
    #[error("{DECODE_INDEX_VARIABLE} must be dynamo or kvdelta, got {0:?}")]
    Unknown(String),
    /// The router is set to what this index has not.
    #[error("{DECODE_INDEX_VARIABLE}=kvdelta cannot be used with {0}")]
    NotWith(&'static str),
}

/// Whether the pool of `role` gets this index: a decode pool, if [`DECODE_INDEX_VARIABLE`] says so.
///
/// # Errors
///
/// [`BadDecodeIndex`], the first in any pool, so that a misspelt name is not taken for the default.
pub fn is_chosen(
    role: Option<WorkerType>,
    config: &KvRouterConfig,
) -> Result<bool, BadDecodeIndex> {
    let name = env::var_os(DECODE_INDEX_VARIABLE).unwrap_or_default();
    choose(&name.to_string_lossy(), role, config)
}

fn choose(
    name: &str,
    role: Option<WorkerType>,
    config: &KvRouterConfig,
) -> Result<bool, BadDecodeIndex> {
    match name {
        "" | "dynamo" => return Ok(false),
        "kvdelta" => {}
        _ => return Err(BadDecodeIndex::Unknown(name.to_owned())),
    }
    if role != Some(WorkerType::Decode) {
        return Ok(false);
    }
    // It is fed by events of this process, holds device memory alone, where conditional disaggregation
    // credits decode workers for the other tiers, and tells the session index nothing.
    let not_with = [
        (config.use_remote_indexer, "use_remote_indexer"),
        (!config.use_kv_events, "use_kv_events=false"),
        (
            config.conditional_disagg_enabled,
            "conditional_disagg_enabled",
        ),
        (
            config.enable_session_prefix_index,
            "enable_session_prefix_index",
        ),
    ];
    match not_with.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, setting)) => Err(BadDecodeIndex::NotWith(setting)),
        None => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_decode_pool_gets_it_and_only_when_it_is_named() {
        let config = KvRouterConfig::default();
        for (name, role, chosen) in [
            ("", Some(WorkerType::Decode), false),
            ("dynamo", Some(WorkerType::Decode), false),
            ("kvdelta", Some(WorkerType::Decode), true),
            ("kvdelta", Some(WorkerType::Prefill), false),
            ("kvdelta", Some(WorkerType::Aggregated), false),
            ("kvdelta", None, false),
        ] {
            assert_eq!(choose(name, role, &config), Ok(chosen), "{name:?} {role:?}");
        }
        for role in [Some(WorkerType::Decode), Some(WorkerType::Prefill), None] {
            let error = choose("Kvdelta", role, &config).unwrap_err().to_string();
            assert_eq!(
                error,
                "DYN_ROUTER_DECODE_INDEX must be dynamo or kvdelta, got \"Kvdelta\""
            );
        }
    }

    #[test]
    fn what_it_has_not_is_refused_by_name_and_only_where_it_would_matter() {
        let with = |change: fn(&mut KvRouterConfig)| {
            let mut config = KvRouterConfig::default();
            change(&mut config);
            config
        };
        for (config, named) in [
            (
                with(|set| set.use_remote_indexer = true),
                "use_remote_indexer",
            ),
            (with(|set| set.use_kv_events = false), "use_kv_events=false"),
            (
                with(|set| set.conditional_disagg_enabled = true),
                "conditional_disagg_enabled",
            ),
            (
                with(|set| set.enable_session_prefix_index = true),
                "enable_session_prefix_index",
            ),
        ] {
            let error = choose("kvdelta", Some(WorkerType::Decode), &config).unwrap_err();
            assert_eq!(error, BadDecodeIndex::NotWith(named));
            assert!(error.to_string().contains(named), "{error}");
            for (name, role) in [("", WorkerType::Decode), ("kvdelta", WorkerType::Prefill)] {
                assert_eq!(choose(name, Some(role), &config), Ok(false));
            }
        }
    }
}
