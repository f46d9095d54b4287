// SPDX-License-Identifier: Apache-2.0

//! Prometheus texts of Dynamo 1.6's frontends and workers, read into facts.
//!
//! Names and labels are those of Dynamo 1.6.1 and vLLM 0.31. What a text lacks stays unknown.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::facts::{
    FrontendCounters, FrontendMetrics, Overlap, Role, TakesEvents, WorkerCounters, WorkerMetrics,
};
use super::prometheus::{self, Sample};

/// The samples of one text.
#[derive(Debug)]
pub(crate) struct Samples(Vec<Sample>);

impl Samples {
    /// Parses a text.
    ///
    /// # Errors
    /// It has no sample.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        Ok(Self(prometheus::parse(text)?))
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }

    /// The sum over the samples with these labels; `None` if there are none.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let values: Vec<f64> = self
            .named(name)
            .filter(|sample| {
                labels
                    .iter()
                    .all(|(label, value)| sample.label(label) == Some(value))
            })
            .map(|sample| sample.value)
            .collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// A sum in which a missing series counts as nothing, if the worker shows `anchor` at all.
    fn sum_beside(&self, anchor: &str, names: &[&str]) -> Option<f64> {
        self.named(anchor).next()?;
        Some(names.iter().filter_map(|name| self.sum(name, &[])).sum())
    }

    /// Instance ids of the worker that these metrics are of, as Dynamo labels its own series.
    pub(crate) fn worker_ids(&self) -> BTreeSet<u64> {
        self.named("dynamo_component_uptime_seconds")
            .filter_map(|sample| u64::from_str_radix(sample.label("worker_id")?, 16).ok())
            .collect()
    }
}

/// Facts of a worker; `later` is a second reading of the same worker.
pub(crate) fn worker(url: &str, first: &Samples, later: Option<&Samples>) -> WorkerMetrics {
    let newest = later.unwrap_or(first);
    let total = worker_counters(newest);
    let watched = later.and_then(|_| worker_grown(&worker_counters(first), &total));
    WorkerMetrics {
        url: url.to_owned(),
        prefix_caching: prefix_caching(newest),
        total,
        watched,
    }
}

/// vLLM's own word; several engines behind one port must all have it on.
fn prefix_caching(samples: &Samples) -> Option<bool> {
    let mut all = None;
    for sample in samples.named("vllm:cache_config_info") {
        let on = match sample.label("enable_prefix_caching")? {
            "True" => true,
            "False" => false,
            _ => return None,
        };
        all = Some(all.unwrap_or(true) && on);
    }
    all
}

fn worker_counters(samples: &Samples) -> WorkerCounters {
    const EVENTS: &str = "dynamo_component_kv_publisher_zmq_events_total";
    const DROPPED: &str = "dynamo_component_kv_publisher_engines_dropped_events_total";
    const REFUSED: &str = "dynamo_component_kv_publisher_zmq_conversion_issues_total";
    let hits = samples.sum("vllm:prefix_cache_hits_total", &[]);
    let prompt = samples.sum("vllm:prompt_tokens_total", &[]);
    WorkerCounters {
        requests: samples.sum(
            "dynamo_component_requests_total",
            &[("dynamo_endpoint", "generate")],
        ),
        // The series of a kind of event appears with its first one, that of lost events at start.
        stored_events: samples
            .sum(EVENTS, &[("event_type", "stored"), ("stage", "accepted")])
            .or_else(|| samples.named(DROPPED).next().map(|_| 0.0)),
        lost_events: samples.sum_beside(DROPPED, &[DROPPED, REFUSED]),
        new_tokens: prompt.zip(hits).map(|(prompt, hits)| prompt - hits),
    }
}

/// `None` if a counter went back: another process answers now.
fn grown(first: Option<f64>, later: Option<f64>) -> Option<Option<f64>> {
    match (first, later) {
        (Some(first), Some(later)) if later < first => None,
        (first, later) => Some(later.map(|later| later - first.unwrap_or(0.0))),
    }
}

fn worker_grown(first: &WorkerCounters, later: &WorkerCounters) -> Option<WorkerCounters> {
    Some(WorkerCounters {
        requests: grown(first.requests, later.requests)?,
        stored_events: grown(first.stored_events, later.stored_events)?,
        lost_events: grown(first.lost_events, later.lost_events)?,
        new_tokens: grown(first.new_tokens, later.new_tokens)?,
    })
}

/// Facts of a frontend; `later` is a second reading of the same frontend.
pub(crate) fn frontend(first: &Samples, later: Option<&Samples>) -> FrontendMetrics {
    let newest = later.unwrap_or(first);
    let total = frontend_counters(newest);
    let watched = later.and_then(|_| {
        let first = frontend_counters(first);
        Some(FrontendCounters {
            requests: grown(first.requests, total.requests)?,
            event_batches: grown(first.event_batches, total.event_batches)?,
        })
    });
    FrontendMetrics {
        is_dynamo: newest
            .0
            .iter()
            .any(|sample| sample.name.starts_with("dynamo_")),
        ready: ready(newest),
        registered: registered(newest),
        takes_events: takes_events(newest),
        zmq_sources: newest.sum(
            "dynamo_component_router_kv_zmq_ingress_sources",
            &[("state", "active")],
        ),
        refused_events: refused_events(newest),
        decode_overlap: decode_overlap(newest),
        total,
        watched,
    }
}

fn frontend_counters(samples: &Samples) -> FrontendCounters {
    FrontendCounters {
        requests: samples.sum("dynamo_frontend_requests_total", &[]),
        event_batches: samples.sum("dynamo_component_router_kv_zmq_ingress_batches_total", &[]),
    }
}

fn ready(samples: &Samples) -> BTreeMap<String, bool> {
    samples
        .named("dynamo_frontend_model_ready")
        .filter_map(|sample| {
            let model = sample.label("model")?;
            Some((model.to_owned(), sample.value > 0.0))
        })
        .collect()
}

fn registered(samples: &Samples) -> BTreeMap<u64, Role> {
    samples
        .named("dynamo_component_router_worker_registered")
        .filter(|sample| sample.value > 0.0)
        .filter_map(|sample| {
            let id = sample.label("router_worker_id")?.parse().ok()?;
            Some((id, Role::parse(sample.label("worker_type")?)?))
        })
        .collect()
}

/// A router that subscribes to a pool's KV events keeps this gauge for the pool, on any event
/// plane; one that does not has no such series.
fn takes_events(samples: &Samples) -> Vec<TakesEvents> {
    samples
        .named("dynamo_component_router_kv_event_source_mismatch_workers")
        .filter_map(|sample| {
            Some(TakesEvents {
                namespace: sample.label("target_namespace")?.to_owned(),
                model: sample.label("model")?.to_owned(),
                role: Role::parse(sample.label("worker_type")?)?,
                missing_workers: sample.value,
            })
        })
        .collect()
}

fn refused_events(samples: &Samples) -> BTreeMap<String, f64> {
    let mut refused: BTreeMap<String, f64> = BTreeMap::new();
    for sample in samples.named("dynamo_component_kv_cache_events_applied") {
        let Some(status) = sample.label("status") else {
            continue;
        };
        // A removal of what is not there does no harm.
        if status != "ok" && status != "block_not_found" && sample.value > 0.0 {
            *refused.entry(status.to_owned()).or_default() += sample.value;
        }
    }
    refused
}

fn decode_overlap(samples: &Samples) -> BTreeMap<String, Overlap> {
    let mut overlap: BTreeMap<String, Overlap> = BTreeMap::new();
    for (name, is_best) in [
        (
            "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
            true,
        ),
        (
            "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
            false,
        ),
    ] {
        for sample in samples.named(name) {
            if sample.label("phase") != Some("decode") {
                continue;
            }
            let Some(model) = sample.label("model") else {
                continue;
            };
            let entry = overlap.entry(model.to_owned()).or_default();
            if is_best {
                entry.best_tokens += sample.value;
            } else {
                entry.chosen_tokens += sample.value;
            }
        }
    }
    overlap
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: &str = "dynamo_component_uptime_seconds{worker_id=\"1f\"} 5\n\
        dynamo_component_kv_publisher_engines_dropped_events_total{worker_id=\"1f\"} 0\n\
        dynamo_component_requests_total{dynamo_endpoint=\"generate\",worker_id=\"1f\"} 4\n\
        dynamo_component_requests_total{dynamo_endpoint=\"clear_kv_blocks\",worker_id=\"1f\"} 9\n\
        vllm:prompt_tokens_total{engine=\"0\"} 400\n\
        vllm:prefix_cache_hits_total{engine=\"0\"} 128\n";

    fn samples(text: &str) -> Samples {
        Samples::parse(text).unwrap()
    }

    #[test]
    fn a_publisher_without_events_has_none_and_no_publisher_is_not_known() {
        let facts = worker("url", &samples(WORKER), None);
        assert_eq!(facts.total.stored_events, Some(0.0));
        assert_eq!(facts.total.requests, Some(4.0));
        assert_eq!(facts.total.new_tokens, Some(272.0));
        assert_eq!(facts.watched, None);
        let without = WORKER.replace("kv_publisher", "other");
        let facts = worker("url", &samples(&without), None);
        assert_eq!(facts.total.stored_events, None);
        assert_eq!(facts.total.lost_events, None);
        assert_eq!(samples(WORKER).worker_ids(), BTreeSet::from([31]));
    }

    #[test]
    fn a_watch_counts_what_grew_and_nothing_after_a_restart() {
        let stored = "dynamo_component_kv_publisher_zmq_events_total\
            {event_type=\"stored\",stage=\"accepted\"} 7\n";
        let later = samples(&format!("{WORKER}{stored}"));
        let watched = worker("url", &samples(WORKER), Some(&later))
            .watched
            .unwrap();
        assert_eq!(watched.stored_events, Some(7.0));
        assert_eq!(watched.requests, Some(0.0));
        let restarted = samples(&WORKER.replace("} 400", "} 1"));
        let facts = worker("url", &later, Some(&restarted));
        assert_eq!(facts.watched, None);
    }

    #[test]
    fn prefix_caching_of_several_engines_must_be_on_in_all() {
        let info =
            |on: &str| format!("vllm:cache_config_info{{enable_prefix_caching=\"{on}\"}} 1\n");
        for (text, expected) in [
            (info("True"), Some(true)),
            (info("True") + &info("False"), Some(false)),
            (info("maybe"), None),
            (WORKER.to_owned(), None),
        ] {
            assert_eq!(prefix_caching(&samples(&text)), expected, "{text}");
        }
    }

    #[test]
    fn refused_events_are_counted_by_reason() {
        let text = "dynamo_component_kv_cache_events_applied{event_type=\"stored\",status=\"ok\"} 5\n\
            dynamo_component_kv_cache_events_applied{event_type=\"stored\",status=\"parent_block_not_found\"} 2\n\
            dynamo_component_kv_cache_events_applied{event_type=\"removed\",status=\"block_not_found\"} 3\n\
            dynamo_component_router_worker_registered{router_worker_id=\"7\",worker_type=\"decode\"} 0\n\
            dynamo_component_router_worker_registered{router_worker_id=\"8\",worker_type=\"decode\"} 1\n";
        let facts = frontend(&samples(text), None);
        let expected = BTreeMap::from([("parent_block_not_found".to_owned(), 2.0)]);
        assert_eq!(facts.refused_events, expected);
        assert_eq!(facts.registered, BTreeMap::from([(8, Role::Decode)]));
    }
}
