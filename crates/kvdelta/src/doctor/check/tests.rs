// SPDX-License-Identifier: Apache-2.0

//! Every finding, from a healthy deployment with one fault.

use super::*;
use crate::doctor::facts::{
    CardRouter, FrontendCounters, Overlap, TakesEvents, WorkerCounters, WorkerMetrics,
};
use Severity::{Note, Problem, Unknown, Warning};
use kvdelta_protocol::NoCapability;

fn worker(role: Role, id: u64) -> Worker {
    let total = WorkerCounters {
        requests: Some(8.0),
        stored_events: Some(9.0),
        lost_events: Some(0.0),
        new_tokens: Some(4000.0),
    };
    Worker {
        namespace: "dynamo".to_owned(),
        component: role.to_string(),
        instance_id: id,
        model: "model".to_owned(),
        card: format!("v1/mdc/{id}"),
        role: Some(role),
        block_size_tokens: Some(32),
        data_parallel_ranks: 1,
        publishes_events: Some(true),
        local_indexer: Some(true),
        event_source_ranks: BTreeSet::from([0]),
        system_url: Some(format!("http://worker:{id}")),
        metrics: Some(WorkerMetrics {
            url: format!("http://worker:{id}/metrics"),
            prefix_caching: Some(true),
            total,
            watched: None,
        }),
        ..Worker::default()
    }
}

/// One prefill and two decode workers with a frontend that has the flag on.
fn healthy() -> Deployment {
    let metrics = FrontendMetrics {
        is_dynamo: true,
        ready: BTreeMap::from([("model".to_owned(), true)]),
        registered: BTreeMap::from([(1, Role::Prefill), (2, Role::Decode), (3, Role::Decode)]),
        takes_events: [Role::Prefill, Role::Decode]
            .map(|role| TakesEvents {
                namespace: "dynamo".to_owned(),
                model: "model".to_owned(),
                role,
                missing_workers: 0.0,
            })
            .to_vec(),
        zmq_sources: Some(3.0),
        decode_overlap: BTreeMap::from([(
            "model".to_owned(),
            Overlap {
                best_tokens: 2000.0,
                chosen_tokens: 1900.0,
            },
        )]),
        ..FrontendMetrics::default()
    };
    Deployment {
        discovery: "files /discovery".to_owned(),
        workers: vec![
            worker(Role::Prefill, 1),
            worker(Role::Decode, 2),
            worker(Role::Decode, 3),
        ],
        event_planes: BTreeSet::from(["Zmq".to_owned()]),
        frontends: vec![Frontend {
            url: "http://frontend".to_owned(),
            metrics: Ok(metrics),
        }],
        ..Deployment::default()
    }
}

fn metrics(deployment: &mut Deployment) -> &mut FrontendMetrics {
    deployment.frontends[0].metrics.as_mut().unwrap()
}

fn of_worker(deployment: &mut Deployment, index: usize) -> &mut WorkerMetrics {
    deployment.workers[index].metrics.as_mut().unwrap()
}

/// A watch in which each decode worker served requests, and this came of it.
fn watched(deployment: &mut Deployment, stored_events: f64, batches: f64) {
    deployment.watched_seconds = Some(30);
    for index in 0..3 {
        of_worker(deployment, index).watched = Some(WorkerCounters {
            requests: Some(2.0),
            stored_events: Some(stored_events),
            lost_events: Some(0.0),
            new_tokens: Some(1000.0),
        });
    }
    metrics(deployment).watched = Some(FrontendCounters {
        requests: Some(4.0),
        event_batches: Some(batches),
    });
}

fn codes(deployment: &Deployment) -> Vec<(Severity, &'static str)> {
    let mut codes: Vec<_> = doctor(deployment)
        .iter()
        .map(|finding| (finding.severity, finding.code))
        .collect();
    codes.sort_unstable();
    codes
}

const TAKEN: (Severity, &str) = (Note, "decode-events-taken");

#[test]
fn a_healthy_deployment_has_no_problem() {
    assert_eq!(codes(&healthy()), [TAKEN]);
    let mut watching = healthy();
    watched(&mut watching, 5.0, 9.0);
    assert_eq!(codes(&watching), [TAKEN]);
}

/// A name, what is changed in a healthy deployment, and the findings then.
type Case = (
    &'static str,
    fn(&mut Deployment),
    &'static [(Severity, &'static str)],
);

const CASES: &[Case] = &[
    (
        "discovery cannot be read",
        |it| {
            it.workers.clear();
            it.discovery_error = Some("/discovery is not a folder".to_owned());
        },
        &[(Unknown, "discovery-unreadable")],
    ),
    (
        "no model",
        |it| it.workers.clear(),
        &[(Unknown, "no-model")],
    ),
    (
        "records that are broken or old",
        |it| {
            it.broken_entries
                .push(("v1/mdc/x".to_owned(), "EOF".to_owned()));
            it.stale_entries.push(("v1/mdc/y".to_owned(), 60));
        },
        &[(Warning, "entry-broken"), (Warning, "entry-stale"), TAKEN],
    ),
    (
        "a frontend that does not answer",
        |it| it.frontends[0].metrics = Err("refused".to_owned()),
        &[(Unknown, "frontend-unreadable")],
    ),
    (
        "something else at the frontend's address",
        |it| it.frontends[0].metrics = Ok(FrontendMetrics::default()),
        &[(Unknown, "frontend-not-dynamo")],
    ),
    (
        "a frontend of other models",
        |it| {
            metrics(it).ready = BTreeMap::from([("other".to_owned(), true)]);
            metrics(it).registered.clear();
        },
        &[(Unknown, "no-frontend-serves")],
    ),
    (
        "a frontend whose own metrics have another prefix",
        |it| metrics(it).ready.clear(),
        &[TAKEN],
    ),
    (
        "one request whose events may be on their way",
        |it| {
            of_worker(it, 1).total.requests = Some(1.0);
            of_worker(it, 1).total.stored_events = Some(0.0);
        },
        &[TAKEN],
    ),
    (
        "a model that is not ready",
        |it| {
            metrics(it).ready = BTreeMap::from([("model".to_owned(), false)]);
        },
        &[(Warning, "model-not-ready"), TAKEN],
    ),
    (
        "round robin",
        |it| {
            metrics(it).registered.clear();
            metrics(it).takes_events.clear();
        },
        &[(Problem, "frontend-not-kv")],
    ),
    (
        "weight 0 or no patch",
        |it| {
            metrics(it).takes_events.pop();
            metrics(it).decode_overlap.clear();
        },
        &[(Problem, "decode-events-not-taken")],
    ),
    (
        "a remote index",
        |it| {
            metrics(it).takes_events.clear();
        },
        &[(Note, "index-elsewhere")],
    ),
    (
        "a router that misses the events of one worker",
        |it| metrics(it).takes_events[1].missing_workers = 1.0,
        &[(Problem, "events-not-received")],
    ),
    (
        "a decode worker that the router lacks",
        |it| {
            metrics(it).registered.remove(&3);
        },
        &[(Warning, "decode-worker-not-registered"), TAKEN],
    ),
    (
        "a frontend of another namespace",
        |it| {
            metrics(it).registered = BTreeMap::from([(9, Role::Decode)]);
        },
        &[(Unknown, "decode-pool-not-routed")],
    ),
    (
        "load that outweighs overlap",
        |it| {
            let overlap = Overlap {
                best_tokens: 2000.0,
                chosen_tokens: 900.0,
            };
            metrics(it)
                .decode_overlap
                .insert("model".to_owned(), overlap);
        },
        &[(Warning, "overlap-outweighed"), TAKEN],
    ),
    (
        "too few tokens to say so",
        |it| {
            let overlap = Overlap {
                best_tokens: 900.0,
                chosen_tokens: 0.0,
            };
            metrics(it)
                .decode_overlap
                .insert("model".to_owned(), overlap);
        },
        &[TAKEN],
    ),
    (
        "an index that refuses events",
        |it| {
            metrics(it)
                .refused_events
                .insert("parent_block_not_found".to_owned(), 4.0);
        },
        &[(Warning, "events-refused"), TAKEN],
    ),
    (
        "events off",
        |it| it.workers[1].publishes_events = Some(false),
        &[(Problem, "decode-events-off"), TAKEN],
    ),
    (
        "events off at a prefill worker do not concern the flag",
        |it| it.workers[0].publishes_events = Some(false),
        &[TAKEN],
    ),
    (
        "workers of an older Dynamo",
        |it| {
            for worker in &mut it.workers {
                worker.publishes_events = None;
            }
        },
        &[(Unknown, "decode-events-unknown"), TAKEN],
    ),
    (
        "one worker of an older Dynamo",
        |it| it.workers[2].publishes_events = None,
        &[
            (Unknown, "decode-events-unknown"),
            (Warning, "mixed-versions"),
            TAKEN,
        ],
    ),
    (
        "a worker whose events have no source",
        |it| it.workers[1].event_source_ranks.clear(),
        &[(Problem, "event-source-missing"), TAKEN],
    ),
    (
        "one rank of two without a source",
        |it| it.workers[1].data_parallel_ranks = 2,
        &[(Problem, "event-source-missing"), TAKEN],
    ),
    (
        "events by an agent",
        |it| {
            it.workers[1].event_source_mode = Some("state_agent_v2".to_owned());
            it.workers[1].event_source_ranks.clear();
        },
        &[(Unknown, "event-source-mode"), TAKEN],
    ),
    (
        "no index at the worker",
        |it| it.workers[1].local_indexer = Some(false),
        &[(Warning, "local-indexer-off"), TAKEN],
    ),
    (
        "no connector that settles claims",
        |it| it.workers[1].no_claims = Some(NoCapability::NotAdvertised),
        &[(Note, "no-claims"), TAKEN],
    ),
    (
        "prefix caching off",
        |it| of_worker(it, 1).prefix_caching = Some(false),
        &[(Problem, "prefix-caching-off"), TAKEN],
    ),
    (
        "prefix caching not shown",
        |it| of_worker(it, 1).prefix_caching = None,
        &[(Unknown, "prefix-caching-unknown"), TAKEN],
    ),
    (
        "metrics of a decode worker that do not answer",
        |it| {
            it.workers[1].metrics = None;
            it.workers[1].metrics_error = Some("refused".to_owned());
        },
        &[(Unknown, "worker-unreadable"), TAKEN],
    ),
    (
        "metrics of a decode worker that nothing tells of",
        |it| {
            it.workers[1].metrics = None;
            it.workers[1].system_url = None;
        },
        &[(Unknown, "worker-unreadable"), TAKEN],
    ),
    (
        "requests, and never an event",
        |it| of_worker(it, 1).total.stored_events = Some(0.0),
        &[(Problem, "no-events"), TAKEN],
    ),
    (
        "requests that were cached already need no event",
        |it| {
            of_worker(it, 1).total.stored_events = Some(0.0);
            of_worker(it, 1).total.new_tokens = Some(200.0);
        },
        &[TAKEN],
    ),
    (
        "events that are not counted",
        |it| of_worker(it, 1).total.stored_events = None,
        &[(Unknown, "event-flow-unknown"), TAKEN],
    ),
    (
        "events lost",
        |it| of_worker(it, 1).total.lost_events = Some(2.0),
        &[(Warning, "events-lost"), TAKEN],
    ),
    (
        "requests and no events during the watch",
        |it| watched(it, 0.0, 0.0),
        &[(Problem, "no-events"), TAKEN],
    ),
    (
        "events that no frontend got during the watch",
        |it| watched(it, 5.0, 0.0),
        &[(Problem, "events-not-delivered"), TAKEN],
    ),
    (
        "no direct sources: delivery is not judged",
        |it| {
            watched(it, 5.0, 0.0);
            metrics(it).zmq_sources = None;
        },
        &[TAKEN],
    ),
    (
        "a watch without requests",
        |it| {
            watched(it, 0.0, 0.0);
            for index in 0..3 {
                let watched = of_worker(it, index).watched.as_mut().unwrap();
                watched.requests = Some(0.0);
                watched.new_tokens = Some(0.0);
            }
        },
        &[TAKEN, (Note, "no-requests")],
    ),
    (
        "decode workers with different blocks",
        |it| it.workers[2].block_size_tokens = Some(64),
        &[(Problem, "block-size-of-decode"), TAKEN],
    ),
    (
        "prefill workers with greater blocks",
        |it| it.workers[0].block_size_tokens = Some(64),
        &[(Problem, "block-size-of-prefill"), TAKEN],
    ),
    (
        "prefill workers with blocks that fit into those of decode",
        |it| it.workers[0].block_size_tokens = Some(16),
        &[(Warning, "block-size-of-prefill"), TAKEN],
    ),
    (
        "a block size that is not known",
        |it| it.workers[2].block_size_tokens = None,
        &[(Unknown, "block-size-unknown"), TAKEN],
    ),
    (
        "decode workers whose cards differ",
        |it| {
            let field = ("context_length".to_owned(), "4096".to_owned());
            it.workers[1].compared = BTreeMap::from([field]);
        },
        &[(Warning, "cards-differ"), TAKEN],
    ),
    (
        "one decode worker",
        |it| {
            it.workers.pop();
        },
        &[(Problem, "one-decode-worker"), TAKEN],
    ),
    (
        "one decode worker with two ranks",
        |it| {
            it.workers.pop();
            it.workers[1].data_parallel_ranks = 2;
            it.workers[1].event_source_ranks.insert(1);
        },
        &[TAKEN],
    ),
    (
        "one decode worker in a domain",
        |it| {
            it.workers[1].required_domain = Some("zone=a".to_owned());
            it.workers[2].required_domain = Some("zone=b".to_owned());
        },
        &[
            (Warning, "one-decode-worker-in-domain"),
            (Warning, "one-decode-worker-in-domain"),
            TAKEN,
        ],
    ),
    (
        "no prefill worker",
        |it| {
            it.workers.remove(0);
        },
        &[(Problem, "no-prefill-worker"), TAKEN],
    ),
    (
        "no decode worker",
        |it| it.workers.truncate(1),
        &[(Problem, "no-decode-worker")],
    ),
    (
        "aggregated workers",
        |it| it.workers = vec![worker(Role::Aggregated, 2), worker(Role::Aggregated, 3)],
        &[(Problem, "aggregated")],
    ),
    (
        "a worker that does not say what it does",
        |it| it.workers[0].role = None,
        &[
            (Problem, "no-prefill-worker"),
            (Unknown, "role-unknown"),
            TAKEN,
        ],
    ),
    (
        "two models on one component",
        |it| {
            let mut other = worker(Role::Decode, 2);
            other.model = "other".to_owned();
            let mut prefill = worker(Role::Prefill, 1);
            prefill.model = "other".to_owned();
            let mut second = worker(Role::Decode, 3);
            second.model = "other".to_owned();
            it.workers.extend([other, prefill, second]);
            let mut taken = metrics(it).takes_events[1].clone();
            taken.model = "other".to_owned();
            metrics(it).takes_events.push(taken);
        },
        &[(Warning, "several-models"), TAKEN],
    ),
    (
        "adapters",
        |it| {
            it.workers[1].adapters.insert("adapter".to_owned());
        },
        &[TAKEN, (Note, "lora")],
    ),
    (
        "a card with a weight",
        |it| {
            it.workers[1].router = Some(CardRouter {
                mode: Some("kv".to_owned()),
                weight: Some(2.0),
                ..CardRouter::default()
            });
        },
        &[(Warning, "card-weight"), TAKEN],
    ),
    (
        "a card with a router configuration and conditional disaggregation",
        |it| {
            it.workers[1].router = Some(CardRouter {
                conditional_disagg: Some(true),
                ..CardRouter::default()
            });
        },
        &[
            (Warning, "card-router"),
            (Note, "conditional-disagg"),
            TAKEN,
        ],
    ),
    (
        "a card that asks for another mode",
        |it| {
            it.workers[1].router = Some(CardRouter {
                mode: Some("roundrobin".to_owned()),
                ..CardRouter::default()
            });
        },
        &[
            (Problem, "card-router-mode"),
            (Warning, "card-router"),
            TAKEN,
        ],
    ),
    (
        "a card without events",
        |it| {
            it.workers[1].router = Some(CardRouter {
                use_kv_events: Some(false),
                ..CardRouter::default()
            });
        },
        &[
            (Problem, "card-without-events"),
            (Warning, "card-router"),
            TAKEN,
        ],
    ),
    (
        "events by NATS",
        |it| it.event_planes = BTreeSet::from(["Nats".to_owned()]),
        &[TAKEN, (Note, "event-plane")],
    ),
];

#[test]
fn each_fault_is_found_and_nothing_else() {
    for (name, change, expected) in CASES {
        let mut deployment = healthy();
        change(&mut deployment);
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(codes(&deployment), expected, "{name}");
    }
}

/// Every code that `check.rs` can write must have its case above.
#[test]
fn every_code_has_a_case() {
    let written: BTreeSet<&str> = include_str!("../check.rs")
        .split('"')
        .filter(|word| {
            word.contains('-')
                && word
                    .chars()
                    .all(|letter| letter.is_ascii_lowercase() || letter == '-')
        })
        .collect();
    let tested: BTreeSet<&str> = CASES
        .iter()
        .flat_map(|(_, _, expected)| expected.iter().map(|(_, code)| *code))
        .collect();
    let missing: Vec<_> = written
        .iter()
        .filter(|code| !tested.contains(*code))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_finding_says_what_where_and_what_to_do() {
    let mut deployment = healthy();
    deployment.workers[1].publishes_events = Some(false);
    deployment.workers[2].publishes_events = Some(false);
    let findings = doctor(&deployment);
    let finding = &findings[0];
    assert_eq!(
        finding.subjects,
        [
            "decode worker dynamo/decode/2",
            "decode worker dynamo/decode/3"
        ]
    );
    assert_eq!(finding.sources[0], "v1/mdc/2: kv_event_publishing_enabled");
    assert!(finding.action.contains("--kv-events-config"), "{finding:?}");
}
