// SPDX-License-Identifier: Apache-2.0

//! The checks: facts in, findings out.

use std::collections::{BTreeMap, BTreeSet};

use super::facts::{
    Deployment, Frontend, FrontendMetrics, Pool, Role, Worker, WorkerCounters, WorkerMetrics,
};
use super::finding::{Finding, Severity, merged};
use super::http;

/// Below this share of the cached prefix tokens at hand, the weight is said to be small.
const LOW_SHARE: f64 = 0.5;
/// Tokens that were to be had before [`LOW_SHARE`] is judged.
const ENOUGH_TOKENS: f64 = 1000.0;

const SET_WEIGHT: &str = "set --router-decode-overlap-score-weight (or \
    DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT, or decode_overlap_score_weight of \
    dynamo-default-cost-fn in the file of --router-policy-config) above 0 at the frontend, for \
    example to 2";
const EVENTS_ON: &str = "turn the engine's KV events on: vLLM --enable-prefix-caching and \
    --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \
    \"tcp://*:5557\"}' (a port a worker), SGLang --kv-events-config";

/// Judges a deployment; the worst finding comes first.
pub(crate) fn doctor(deployment: &Deployment) -> Vec<Finding> {
    let mut found = Vec::new();
    discovery(deployment, &mut found);
    for frontend in &deployment.frontends {
        frontend_itself(frontend, &mut found);
    }
    for pool in deployment.pools() {
        shape(&pool, &mut found);
        for worker in &pool.workers {
            card(worker, &mut found);
        }
        for worker in pool.of(Role::Decode) {
            events(deployment, worker, &mut found);
            prefix_caching(worker, &mut found);
            event_flow(deployment, worker, &mut found);
            claims(worker, &mut found);
        }
        block_sizes(&pool, &mut found);
        for frontend in &deployment.frontends {
            if let Ok(metrics) = &frontend.metrics
                && metrics.is_dynamo
            {
                routing(&pool, frontend, metrics, &mut found);
            }
        }
        served(deployment, &pool, &mut found);
    }
    shared_components(deployment, &mut found);
    event_plane(deployment, &mut found);
    delivery(deployment, &mut found);
    merged(found)
}

fn discovery(deployment: &Deployment, found: &mut Vec<Finding>) {
    if let Some(error) = &deployment.discovery_error {
        found.push(Finding::new(
            Severity::Unknown,
            "discovery-unreadable",
            "discovery",
            error,
            &deployment.discovery,
            "give --file-kv DIR or --etcd URL, or the deployment's DYN_DISCOVERY_BACKEND, \
             DYN_FILE_KV, ETCD_ENDPOINTS",
        ));
        return;
    }
    for (key, reason) in &deployment.broken_entries {
        found.push(Finding::new(
            Severity::Warning,
            "entry-broken",
            "discovery record",
            format!("cannot be understood: {reason}"),
            key,
            "restart the worker that wrote it; Dynamo ignores the record, so it routes nothing there",
        ));
    }
    for (key, age) in &deployment.stale_entries {
        found.push(Finding::new(
            Severity::Warning,
            "entry-stale",
            "discovery record",
            format!("not touched for {age} s, so its worker is gone; left out of the other checks"),
            key,
            "nothing if the worker was stopped; else see why it ended",
        ));
    }
    if deployment.workers.is_empty() {
        let seen = if deployment.left_out.is_empty() {
            "no model is registered".to_owned()
        } else {
            let others: Vec<&str> = deployment.left_out.iter().map(String::as_str).collect();
            format!("no model matches; there are {}", others.join(", "))
        };
        found.push(Finding::new(
            Severity::Unknown,
            "no-model",
            "discovery",
            seen,
            &deployment.discovery,
            "start the workers, or look at --file-kv, --etcd, --namespace and --model",
        ));
    }
}

fn frontend_itself(frontend: &Frontend, found: &mut Vec<Finding>) {
    let subject = format!("frontend {}", frontend.url);
    match &frontend.metrics {
        Err(error) => found.push(Finding::new(
            Severity::Unknown,
            "frontend-unreadable",
            subject,
            error,
            &frontend.url,
            "start it, or give its address with --frontend URL",
        )),
        Ok(metrics) if !metrics.is_dynamo => found.push(Finding::new(
            Severity::Unknown,
            "frontend-not-dynamo",
            subject,
            "none of its metrics is Dynamo's",
            &frontend.url,
            "give the address of Dynamo's frontend with --frontend URL",
        )),
        Ok(metrics) => {
            for (reason, count) in &metrics.refused_events {
                found.push(Finding::new(
                    Severity::Warning,
                    "events-refused",
                    &subject,
                    format!("its index refused {count} KV events: {reason}"),
                    source(
                        &frontend.url,
                        "dynamo_component_kv_cache_events_applied{status}",
                    ),
                    "look at the frontend's log: the index holds less than the workers do",
                ));
            }
        }
    }
}

/// Which workers there are.
fn shape(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let of = |role| pool.of(role).count();
    let (prefill, decode) = (of(Role::Prefill), of(Role::Decode));
    let name = pool.name();
    let cards = source(card_of(pool), "worker_type");
    let mut problem = |code, seen: String, action: &str| {
        found.push(Finding::new(
            Severity::Problem,
            code,
            &name,
            seen,
            &cards,
            action,
        ));
    };
    match (prefill, decode) {
        (_, 0) if of(Role::Aggregated) > 0 => problem(
            "aggregated",
            format!("{} aggregated and no decode workers", of(Role::Aggregated)),
            "the flag is for decode pools; aggregated workers are chosen by \
             --router-kv-overlap-score-credit",
        ),
        (_, 0) => problem(
            "no-decode-worker",
            "no decode worker".to_owned(),
            "start decode workers: --disaggregation-mode decode",
        ),
        (0, _) => problem(
            "no-prefill-worker",
            format!("{decode} decode and no prefill workers"),
            "start prefill workers: --disaggregation-mode prefill",
        ),
        _ => {}
    }
    let ranks: u64 = pool
        .of(Role::Decode)
        .map(|worker| worker.data_parallel_ranks)
        .sum();
    if decode == 1 && ranks <= 1 {
        problem(
            "one-decode-worker",
            "one decode worker with one rank, so there is nothing to choose".to_owned(),
            "start more decode workers; with one, its engine already reads only what it misses",
        );
    }
    let without_role: Vec<&&Worker> = pool
        .workers
        .iter()
        .filter(|worker| worker.role.is_none())
        .collect();
    for worker in without_role {
        found.push(Finding::new(
            Severity::Unknown,
            "role-unknown",
            worker.name(),
            "its card has no known worker_type",
            &worker.card,
            "run a worker of Dynamo 1.6; older ones do not say what they do",
        ));
    }
    cards_differ(pool, found);
    domains(pool, found);
    adapters(pool, found);
    versions(pool, found);
}

fn cards_differ(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let workers: Vec<&Worker> = pool.of(Role::Decode).collect();
    let fields: BTreeSet<&str> = workers
        .iter()
        .flat_map(|worker| worker.compared.keys().map(String::as_str))
        .collect();
    let differ: Vec<&str> = fields
        .into_iter()
        .filter(|field| {
            let values: BTreeSet<_> = workers
                .iter()
                .map(|worker| worker.compared.get(*field))
                .collect();
            values.len() > 1
        })
        .collect();
    if !differ.is_empty() {
        found.push(Finding::new(
            Severity::Warning,
            "cards-differ",
            pool.name(),
            format!(
                "the cards of its decode workers differ in {}",
                differ.join(", ")
            ),
            &workers[0].card,
            "make them the same: a frontend sends nothing to a worker whose card is not like that \
             of the first (its log: \"Rejected incompatible workers\")",
        ));
    }
}

fn domains(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let mut domains: BTreeMap<&str, Vec<&Worker>> = BTreeMap::new();
    for worker in pool.of(Role::Decode) {
        if let Some(domain) = &worker.required_domain {
            domains.entry(domain).or_default().push(worker);
        }
    }
    for (domain, workers) in domains {
        let ranks: u64 = workers
            .iter()
            .map(|worker| worker.data_parallel_ranks)
            .sum();
        if ranks <= 1 {
            found.push(Finding::new(
                Severity::Warning,
                "one-decode-worker-in-domain",
                pool.name(),
                format!("one decode worker in {domain}, which KV must not leave"),
                source(&workers[0].card, "kv_transfer_enforcement"),
                "start more decode workers there, or set kv_transfer_enforcement to preferred",
            ));
        }
    }
}

fn adapters(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let adapters: BTreeSet<&str> = pool
        .of(Role::Decode)
        .flat_map(|worker| worker.adapters.iter().map(String::as_str))
        .collect();
    if !adapters.is_empty() {
        let names: Vec<&str> = adapters.into_iter().collect();
        found.push(Finding::new(
            Severity::Note,
            "lora",
            pool.name(),
            format!(
                "LoRA adapters on the decode workers: {}; a prefix is cached for each adapter \
                 by itself",
                names.join(", ")
            ),
            source(card_of(pool), "lora"),
            "expect less overlap than requests of one adapter have",
        ));
    }
}

fn versions(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let (new, old): (Vec<&Worker>, Vec<&Worker>) = pool
        .workers
        .iter()
        .copied()
        .partition(|worker| worker.publishes_events.is_some());
    if !new.is_empty() && !old.is_empty() {
        for worker in old {
            found.push(Finding::new(
                Severity::Warning,
                "mixed-versions",
                worker.name(),
                "its card lacks kv_event_publishing_enabled, which others of its pool have",
                &worker.card,
                "bring all workers of the pool to Dynamo 1.6",
            ));
        }
    }
}

/// Whether a router may tell prefill what the worker holds. The choice of decode does not need it.
fn claims(worker: &Worker, found: &mut Vec<Finding>) {
    if let Some(reason) = worker.no_claims {
        found.push(Finding::new(
            Severity::Note,
            "no-claims",
            worker.name(),
            format!("no claims are made: {reason}"),
            source(&worker.card, "runtime_data.decode_cache_info"),
            "nothing if decode is to be chosen by overlap and no more; for claims, what \
             docs/transfer.md (vLLM) or docs/sglang.md (SGLang) says: the worker's log names what \
             is missing",
        ));
    }
}

/// What a card says beside events.
fn card(worker: &Worker, found: &mut Vec<Finding>) {
    let Some(router) = &worker.router else {
        return;
    };
    let at = source(&worker.card, "router_config");
    let mut push = |severity, code, seen: String, action: &str| {
        found.push(Finding::new(
            severity,
            code,
            worker.name(),
            seen,
            &at,
            action,
        ));
    };
    if let Some(mode) = router.mode.as_ref().filter(|mode| *mode != "kv") {
        push(
            Severity::Problem,
            "card-router-mode",
            format!("its card asks for router mode {mode}, which goes before the frontend's"),
            "register the worker without a router configuration, or with mode kv",
        );
    } else if router.use_kv_events == Some(false) {
        push(
            Severity::Problem,
            "card-without-events",
            "its card turns the router's KV events off (use_kv_events)".to_owned(),
            "register the worker with use_kv_events on",
        );
    }
    match router.weight {
        Some(weight) => push(
            Severity::Warning,
            "card-weight",
            format!("its card brings decode_overlap_score_weight {weight} with it"),
            "know that frontends without the patch refuse this card, and that the weight counts \
             unless the frontend has one by option or variable",
        ),
        None => push(
            Severity::Warning,
            "card-router",
            "its card brings a router configuration without decode_overlap_score_weight".to_owned(),
            "give the weight by option or variable of the frontend, which goes before the card",
        ),
    }
    if router.conditional_disagg == Some(true) {
        push(
            Severity::Note,
            "conditional-disagg",
            "its card turns conditional disaggregation on".to_owned(),
            "know that short rests of prompts are computed on the decode worker and move nothing",
        );
    }
}

/// Whether a decode worker publishes events, by discovery.
fn events(deployment: &Deployment, worker: &Worker, found: &mut Vec<Finding>) {
    let at = source(&worker.card, "kv_event_publishing_enabled");
    match worker.publishes_events {
        Some(false) => found.push(Finding::new(
            Severity::Problem,
            "decode-events-off",
            worker.name(),
            "it publishes no KV events, so the router never sees what it caches",
            at,
            EVENTS_ON,
        )),
        None => found.push(Finding::new(
            Severity::Unknown,
            "decode-events-unknown",
            worker.name(),
            "its card does not say whether it publishes KV events",
            at,
            "run a worker of Dynamo 1.6",
        )),
        Some(true) => {
            let mode = worker.event_source_mode.as_deref();
            let sources = worker.event_source_ranks.len() as u64;
            if let Some(mode) = mode.filter(|mode| *mode != "framework_v1") {
                found.push(Finding::new(
                    Severity::Unknown,
                    "event-source-mode",
                    worker.name(),
                    format!("its KV events come by {mode}, which is not judged here"),
                    source(&worker.card, "kv_event_source_mode"),
                    "look for the frontend's kv_event_source warnings",
                ));
            } else if sources < worker.data_parallel_ranks {
                found.push(Finding::new(
                    Severity::Problem,
                    "event-source-missing",
                    worker.name(),
                    format!(
                        "{sources} of {} ranks have a source of KV events",
                        worker.data_parallel_ranks
                    ),
                    format!("{}: v1/event_sources", deployment.discovery),
                    "look into the worker's log for its KV event publisher; restart it",
                ));
            }
        }
    }
    if worker.local_indexer == Some(false) {
        found.push(Finding::new(
            Severity::Warning,
            "local-indexer-off",
            worker.name(),
            "it keeps no index of its own, so a frontend that starts later or misses events never \
             learns of the blocks cached before",
            source(&worker.card, "enable_local_indexer"),
            "leave enable_local_indexer of the worker's runtime configuration on",
        ));
    }
}

fn prefix_caching(worker: &Worker, found: &mut Vec<Finding>) {
    let Some(metrics) = &worker.metrics else {
        let seen = match (&worker.metrics_error, &worker.system_url) {
            (Some(error), _) => format!("its metrics cannot be read: {error}"),
            (None, Some(url)) => format!("its metrics at {url} were not read"),
            (None, None) => "nothing tells where its metrics are".to_owned(),
        };
        found.push(Finding::new(
            Severity::Unknown,
            "worker-unreadable",
            worker.name(),
            format!("{seen}; prefix caching and the flow of its events are unknown"),
            worker
                .system_url
                .as_deref()
                .map_or_else(|| worker.card.clone(), http::shown),
            "set DYN_SYSTEM_PORT at the worker, and give its address with --metrics URL if \
             discovery does not hold it",
        ));
        return;
    };
    let at = source(
        &metrics.url,
        "vllm:cache_config_info{enable_prefix_caching}",
    );
    match metrics.prefix_caching {
        Some(true) => {}
        Some(false) => found.push(Finding::new(
            Severity::Problem,
            "prefix-caching-off",
            worker.name(),
            "its engine caches no prefixes, so there is nothing to find",
            at,
            "start it with --enable-prefix-caching",
        )),
        None => found.push(Finding::new(
            Severity::Unknown,
            "prefix-caching-unknown",
            worker.name(),
            "its metrics do not say whether the engine caches prefixes",
            at,
            "look at the engine's start line; only vLLM says it in its metrics",
        )),
    }
}

/// Requests served, but no events.
fn event_flow(deployment: &Deployment, worker: &Worker, found: &mut Vec<Finding>) {
    let (Some(metrics), Some(true)) = (&worker.metrics, worker.publishes_events) else {
        return;
    };
    let (counters, since) = match (&metrics.watched, deployment.watched_seconds) {
        (Some(watched), Some(seconds)) => (watched, format!("in {seconds} s")),
        _ => (&metrics.total, "since its start".to_owned()),
    };
    let at = source(
        &metrics.url,
        "dynamo_component_kv_publisher_zmq_events_total{event_type=\"stored\"}",
    );
    if let Some(lost) = metrics.total.lost_events.filter(|lost| *lost > 0.0) {
        found.push(Finding::new(
            Severity::Warning,
            "events-lost",
            worker.name(),
            format!("{lost} KV events were lost or refused between engine and publisher"),
            source(
                &metrics.url,
                "dynamo_component_kv_publisher_engines_dropped_events_total and \
                 ..._zmq_conversion_issues_total",
            ),
            "raise hwm and buffer_steps of --kv-events-config; look into the worker's log",
        ));
    }
    match (must_have_stored(worker, counters), counters.stored_events) {
        (Some((requests, tokens)), Some(0.0)) => found.push(Finding::new(
            Severity::Problem,
            "no-events",
            worker.name(),
            format!(
                "{since} it served {requests} requests with {tokens} prompt tokens new to its \
                 cache, and published no KV event about them"
            ),
            at,
            "compare the endpoint of --kv-events-config with the worker's log (\"KV event \
             publisher\"); every worker on a host needs a port of its own",
        )),
        (Some((requests, _)), None) => found.push(Finding::new(
            Severity::Unknown,
            "event-flow-unknown",
            worker.name(),
            format!("{since} it served {requests} requests; whether it published events is not in its metrics"),
            at,
            "look into the worker's log for its KV event publisher",
        )),
        _ => {}
    }
}

/// Requests and new tokens, if at least one block of them must have been stored.
///
/// Hits end at a block's end; so with a block of new tokens a request, one block at least is full.
fn must_have_stored(worker: &Worker, counters: &WorkerCounters) -> Option<(f64, f64)> {
    let (requests, tokens) = (counters.requests?, counters.new_tokens?);
    let block = worker.block_size_tokens? as f64;
    // The events of a request that has just come may be on their way.
    (requests > 1.0 && tokens >= requests * block).then_some((requests, tokens))
}

fn block_sizes(pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let sizes = |role| -> BTreeSet<u64> {
        pool.of(role)
            .filter_map(|worker| worker.block_size_tokens)
            .collect()
    };
    let (prefill, decode) = (sizes(Role::Prefill), sizes(Role::Decode));
    let list = |sizes: &BTreeSet<u64>| {
        let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
        sizes.join(" and ")
    };
    let at = source(card_of(pool), "kv_cache_block_size");
    if decode.len() > 1 {
        found.push(Finding::new(
            Severity::Problem,
            "block-size-of-decode",
            pool.name(),
            format!("decode workers have blocks of {} tokens", list(&decode)),
            at,
            "give all decode workers the same --block-size: a frontend sends nothing to those of another \
             size than the first (its log: \"Rejected incompatible workers\")",
        ));
    } else if !prefill.is_empty() && !decode.is_empty() && prefill != decode {
        let fits = decode
            .iter()
            .all(|own| prefill.iter().all(|remote| own.is_multiple_of(*remote)));
        found.push(Finding::new(
            // vLLM's NIXL connector fails the transfer otherwise, and with it the request.
            if fits {
                Severity::Warning
            } else {
                Severity::Problem
            },
            "block-size-of-prefill",
            pool.name(),
            format!(
                "prefill workers have blocks of {} tokens, decode workers of {}{}",
                list(&prefill),
                list(&decode),
                if fits {
                    ""
                } else {
                    ", which are no multiple of them: vLLM's NIXL connector fails every request"
                }
            ),
            at,
            "give all workers the same --block-size",
        ));
    }
    for worker in pool.of(Role::Decode) {
        if worker.block_size_tokens.is_none() {
            found.push(Finding::new(
                Severity::Unknown,
                "block-size-unknown",
                worker.name(),
                "its card has no block size",
                source(&worker.card, "kv_cache_block_size"),
                "give it a --block-size",
            ));
        }
    }
}

/// Whether a frontend knows the pool, by its model, or by its workers where another prefix
/// (`DYN_METRICS_PREFIX`) hides the models.
fn serves(pool: &Pool<'_>, metrics: &FrontendMetrics) -> bool {
    metrics.ready.contains_key(pool.model)
        || pool
            .workers
            .iter()
            .any(|worker| metrics.registered.contains_key(&worker.instance_id))
}

/// What one frontend does with one pool.
fn routing(
    pool: &Pool<'_>,
    frontend: &Frontend,
    metrics: &FrontendMetrics,
    found: &mut Vec<Finding>,
) {
    if !serves(pool, metrics) {
        return;
    }
    let subject = format!("frontend {} for {}", frontend.url, pool.name());
    if metrics.ready.get(pool.model) == Some(&false) {
        found.push(Finding::new(
            Severity::Warning,
            "model-not-ready",
            &subject,
            "it cannot route requests of this model",
            source(&frontend.url, "dynamo_frontend_model_ready"),
            "wait for the workers, or look into the frontend's log",
        ));
    }
    if pool.of(Role::Decode).count() == 0 {
        return;
    }
    let has = |worker: &&Worker| metrics.registered.contains_key(&worker.instance_id);
    let registered = "dynamo_component_router_worker_registered";
    if metrics.registered.is_empty() {
        found.push(Finding::new(
            Severity::Problem,
            "frontend-not-kv",
            &subject,
            "it has no KV router",
            source(&frontend.url, registered),
            "start it with --router-mode kv (DYN_ROUTER_MODE=kv)",
        ));
        return;
    }
    if !pool.of(Role::Decode).any(|worker| has(&worker)) {
        found.push(Finding::new(
            Severity::Unknown,
            "decode-pool-not-routed",
            &subject,
            "no decode worker of this pool is registered with its KV router",
            source(&frontend.url, registered),
            "look at the frontend's namespace (DYN_NAMESPACE, DYN_NAMESPACE_PREFIX) and its log",
        ));
        return;
    }
    for worker in pool.of(Role::Decode).filter(|worker| !has(worker)) {
        found.push(Finding::new(
            Severity::Warning,
            "decode-worker-not-registered",
            worker.name(),
            format!(
                "it is in discovery, and not with the router of {}",
                frontend.url
            ),
            source(&frontend.url, registered),
            "wait if it has just started; else compare its card with the others': a frontend \
             refuses one that differs",
        ));
    }
    let taken = metrics.takes_events.iter().find(|taken| {
        taken.role == Role::Decode && taken.model == pool.model && taken.namespace == pool.namespace
    });
    let gauge = source(
        &frontend.url,
        "dynamo_component_router_kv_event_source_mismatch_workers{worker_type=\"decode\"}",
    );
    let overlap = metrics.decode_overlap.get(pool.model).copied();
    match taken {
        Some(taken) if taken.missing_workers > 0.0 => found.push(Finding::new(
            Severity::Problem,
            "events-not-received",
            &subject,
            format!(
                "it misses the KV events of {} decode workers or ranks",
                taken.missing_workers
            ),
            gauge,
            "see the findings about these workers, and its log for kv_event_publisher_disabled \
             or kv_event_source_not_observed",
        )),
        Some(_) => found.push(Finding::new(
            Severity::Note,
            "decode-events-taken",
            &subject,
            "it takes the decode workers' KV events: a weight above 0, or conditional \
             disaggregation, which cannot be told apart from outside",
            gauge,
            "nothing if the weight was set; else set it",
        )),
        // A router that finds prefixes without subscribing asks another index.
        None if overlap.is_some_and(|overlap| overlap.best_tokens > 0.0) => {
            found.push(Finding::new(
                Severity::Note,
                "index-elsewhere",
                &subject,
                "it finds cached prefixes on decode workers without their KV events",
                source(
                    &frontend.url,
                    "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
                ),
                "know that its index is a remote or approximate one, which is not looked at here",
            ));
        }
        None => found.push(Finding::new(
            Severity::Problem,
            "decode-events-not-taken",
            &subject,
            "it does not take the decode workers' KV events: the weight is 0 or not set, or its \
             Dynamo lacks the patch, or its KV events are off (--no-router-kv-events)",
            gauge,
            format!("{SET_WEIGHT}; use a frontend built with the patch series"),
        )),
    }
    if let Some(overlap) = overlap.filter(|_| taken.is_some())
        && overlap.best_tokens >= ENOUGH_TOKENS
        && overlap.chosen_tokens < overlap.best_tokens * LOW_SHARE
    {
        found.push(Finding::new(
            Severity::Warning,
            "overlap-outweighed",
            &subject,
            format!(
                "of {} cached prefix tokens on the best decode workers, the chosen ones had {}",
                overlap.best_tokens, overlap.chosen_tokens
            ),
            source(
                &frontend.url,
                "dynamo_component_router_kv_selected_cached_prefix_tokens_total{phase=\"decode\"}",
            ),
            "load outweighs overlap: try a greater weight",
        ));
    }
}

/// Whether any frontend that could be read serves the pool.
fn served(deployment: &Deployment, pool: &Pool<'_>, found: &mut Vec<Finding>) {
    let readable: Vec<&FrontendMetrics> = deployment
        .frontends
        .iter()
        .filter_map(|frontend| frontend.metrics.as_ref().ok())
        .filter(|metrics| metrics.is_dynamo)
        .collect();
    if !readable.is_empty() && !readable.iter().any(|metrics| serves(pool, metrics)) {
        found.push(Finding::new(
            Severity::Unknown,
            "no-frontend-serves",
            pool.name(),
            "none of the frontends that were read serves this model",
            "dynamo_frontend_model_ready",
            "give the frontend that does with --frontend URL",
        ));
    }
}

/// Different models behind one component.
fn shared_components(deployment: &Deployment, found: &mut Vec<Finding>) {
    let mut models: BTreeMap<(&str, &str), BTreeMap<&str, &Worker>> = BTreeMap::new();
    for worker in &deployment.workers {
        if worker.role == Some(Role::Decode) {
            models
                .entry((&worker.namespace, &worker.component))
                .or_default()
                .insert(&worker.model, worker);
        }
    }
    for ((namespace, component), models) in models {
        if models.len() > 1 {
            let names: Vec<&str> = models.keys().copied().collect();
            found.push(Finding::new(
                Severity::Warning,
                "several-models",
                format!("{namespace}/{component}"),
                format!(
                    "its decode workers serve several models: {}",
                    names.join(", ")
                ),
                models.values().next().map_or("", |worker| &worker.card),
                "give each model a component or namespace of its own: each has a router of its own, \
                 which counts its own requests as load",
            ));
        }
    }
}

fn event_plane(deployment: &Deployment, found: &mut Vec<Finding>) {
    for plane in &deployment.event_planes {
        if plane != "Zmq" {
            found.push(Finding::new(
                Severity::Note,
                "event-plane",
                "event plane",
                format!("KV events travel by {plane}; whether they arrive was not judged"),
                format!("{}: v1/event_channels", deployment.discovery),
                "look at dynamo_component_kv_cache_events_applied of the frontend",
            ));
        }
    }
}

/// Events that workers published during the watch, and no frontend got.
fn delivery(deployment: &Deployment, found: &mut Vec<Finding>) {
    let Some(seconds) = deployment.watched_seconds else {
        return;
    };
    let stored = |worker: &Worker| -> Option<f64> {
        let metrics: &WorkerMetrics = worker.metrics.as_ref()?;
        metrics.watched.as_ref()?.stored_events
    };
    for frontend in &deployment.frontends {
        let Ok(metrics) = &frontend.metrics else {
            continue;
        };
        let takes = |worker: &&Worker| {
            metrics.takes_events.iter().any(|taken| {
                Some(taken.role) == worker.role
                    && taken.model == worker.model
                    && taken.namespace == worker.namespace
            })
        };
        let published: f64 = deployment
            .workers
            .iter()
            .filter(takes)
            .filter_map(stored)
            .sum();
        // The counter is that of direct ZMQ; on another plane there are no such sources.
        let by_zmq = metrics.zmq_sources.is_some_and(|sources| sources > 0.0);
        let batches = metrics
            .watched
            .as_ref()
            .and_then(|watched| watched.event_batches);
        if by_zmq && published > 0.0 && batches == Some(0.0) {
            found.push(Finding::new(
                Severity::Problem,
                "events-not-delivered",
                format!("frontend {}", frontend.url),
                format!("in {seconds} s workers published {published} KV events, and none arrived"),
                source(
                    &frontend.url,
                    "dynamo_component_router_kv_zmq_ingress_batches_total",
                ),
                "see that the frontend can reach the workers' ZMQ ports (v1/event_channels)",
            ));
        }
    }
    let requests: Vec<Option<f64>> = deployment
        .workers
        .iter()
        .filter(|worker| worker.role == Some(Role::Decode))
        .map(|worker| {
            let metrics = worker.metrics.as_ref()?;
            metrics.watched.as_ref()?.requests
        })
        .collect();
    if requests.iter().flatten().sum::<f64>() == 0.0 && !requests.is_empty() {
        found.push(Finding::new(
            Severity::Note,
            "no-requests",
            "decode workers",
            format!("no request reached them in {seconds} s, so the flow of events was not judged"),
            "dynamo_component_requests_total",
            "watch while requests are served",
        ));
    }
}

/// A card to name for what the cards of a pool say together, a decode worker's if there is one.
fn card_of<'a>(pool: &Pool<'a>) -> &'a str {
    pool.of(Role::Decode)
        .next()
        .or_else(|| pool.workers.first().copied())
        .map_or("", |worker| &worker.card)
}

/// A place and what was read there.
fn source(place: &str, what: &str) -> String {
    format!("{place}: {what}")
}

#[cfg(test)]
mod tests;
