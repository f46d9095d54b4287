// SPDX-License-Identifier: Apache-2.0

//! `kvdelta doctor`: reads a running deployment and says what keeps the flag from helping.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use reqwest::blocking::Client;

use crate::doctor::check::doctor;
use crate::doctor::discovery::{self, Wanted};
use crate::doctor::facts::{Deployment, Frontend};
use crate::doctor::finding::exit_code;
use crate::doctor::http;
use crate::doctor::metrics::{self, Samples};
use crate::doctor::store::{Store, address};
use crate::render::{self, say};

/// How often a watch says that it still runs.
const REPEAT: Duration = Duration::from_secs(5);

/// Options of `kvdelta doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvdelta doctor                                   discovery by DYN_DISCOVERY_BACKEND, DYN_FILE_KV,
                                                   ETCD_ENDPOINTS, as Dynamo takes them
  kvdelta doctor --file-kv /tmp/dynamo --frontend http://10.0.0.1:8000
  kvdelta doctor --etcd http://10.0.0.2:2379 --watch 30 --json

Exit codes: 0 nothing keeps the flag from helping, 1 problems were found, 2 the deployment, or a
part of it that decides, could not be read (also: an option that cannot be read, a report that
cannot be written). Warnings and notes do not change it.")]
pub(crate) struct Options {
    /// Read discovery from this folder of Dynamo's file back end.
    #[arg(long, value_name = "DIR", conflicts_with = "etcd")]
    file_kv: Option<PathBuf>,

    /// Read discovery from etcd, by its HTTP address; several with commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = address)]
    etcd: Vec<String>,

    /// A frontend; may be given several times.
    #[arg(
        long = "frontend",
        value_name = "URL",
        default_value = "http://127.0.0.1:8000",
        value_parser = address
    )]
    frontends: Vec<String>,

    /// The system port of a worker that discovery does not show; may be given several times.
    #[arg(long, value_name = "URL", value_parser = address)]
    metrics: Vec<String>,

    /// Look at this namespace only.
    #[arg(long)]
    namespace: Option<String>,

    /// Look at this model only.
    #[arg(long)]
    model: Option<String>,

    /// Read the counters twice, so many seconds apart, while requests are served.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> ExitCode {
    match examine(options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn examine(options: &Options) -> Result<u8> {
    let client = http::client()?;
    let mut deployment = read_discovery(options, &client);
    read_metrics(options, &client, &mut deployment);
    let findings = doctor(&deployment);
    let report = if options.json {
        render::json(&deployment, &findings)? + "\n"
    } else {
        render::text(&deployment, &findings)
    };
    render::print(&report).context("cannot write the report to standard output")?;
    Ok(exit_code(&findings))
}

fn read_discovery(options: &Options, client: &Client) -> Deployment {
    let file_kv = options.file_kv.as_deref();
    let store = Store::choose(file_kv, &options.etcd, |name| env::var(name).ok());
    let wanted = Wanted {
        namespace: options.namespace.clone(),
        model: options.model.clone(),
    };
    let mut deployment = match store.read(client) {
        Ok(entries) => discovery::deployment(&entries, &wanted),
        Err(error) => Deployment {
            discovery_error: Some(format!("{error:#}")),
            ..Deployment::default()
        },
    };
    deployment.discovery = store.name();
    deployment
}

fn metrics_path(system_url: &str) -> String {
    format!("{system_url}/metrics")
}

/// Reads the metrics of frontends and workers, twice with `--watch`, into the deployment.
fn read_metrics(options: &Options, client: &Client, deployment: &mut Deployment) {
    let frontends: Vec<String> = options
        .frontends
        .iter()
        .map(|url| http::metrics_url(url))
        .collect();
    let mut workers: Vec<String> = options
        .metrics
        .iter()
        .map(|url| http::metrics_url(url))
        .collect();
    for worker in &deployment.workers {
        let url = worker.system_url.as_deref().map(metrics_path);
        if let Some(url) = url.filter(|url| !workers.contains(url)) {
            workers.push(url);
        }
    }
    let urls = [frontends.clone(), workers.clone()].concat();
    let first = scrape(client, &urls);
    let later = options.watch.map(|seconds| {
        wait(seconds);
        deployment.watched_seconds = Some(seconds);
        scrape(client, &urls)
    });
    for (url, given) in frontends.iter().zip(&options.frontends) {
        deployment.frontends.push(Frontend {
            url: http::shown(given),
            metrics: both(&first, later.as_ref(), url)
                .map(|(first, later)| metrics::frontend(first, later)),
        });
    }
    for url in &workers {
        match both(&first, later.as_ref(), url) {
            Ok((first, later)) => {
                let ids = first.worker_ids();
                let mut workers = deployment
                    .workers
                    .iter_mut()
                    .filter(|worker| ids.contains(&worker.instance_id))
                    .peekable();
                if workers.peek().is_none() {
                    say(&format!(
                        "warning: {} shows no worker that discovery has here",
                        http::shown(url)
                    ));
                }
                for worker in workers {
                    worker.metrics = Some(metrics::worker(&http::shown(url), first, later));
                }
            }
            Err(error) => {
                for worker in &mut deployment.workers {
                    if worker.system_url.as_deref().map(metrics_path).as_ref() == Some(url) {
                        worker.metrics_error = Some(error.clone());
                    }
                }
            }
        }
    }
}

type Scrapes = BTreeMap<String, Result<Samples, String>>;

/// The readings of one server; the second must have succeeded too, if there was one.
fn both<'a>(
    first: &'a Scrapes,
    later: Option<&'a Scrapes>,
    url: &str,
) -> Result<(&'a Samples, Option<&'a Samples>), String> {
    let of = |scrapes: &'a Scrapes| match scrapes.get(url) {
        Some(Ok(samples)) => Ok(samples),
        Some(Err(error)) => Err(error.clone()),
        None => Err(format!("{} was not read", http::shown(url))),
    };
    Ok((of(first)?, later.map(of).transpose()?))
}

fn scrape(client: &Client, urls: &[String]) -> Scrapes {
    let texts = http::texts(client, urls);
    urls.iter()
        .cloned()
        .zip(texts)
        .map(|(url, text)| {
            let samples = text.and_then(|text| Samples::parse(&text));
            (url, samples.map_err(|error| format!("{error:#}")))
        })
        .collect()
}

/// Sleeps, and says on standard error how far it is.
fn wait(seconds: u64) {
    let start = Instant::now();
    let end = Duration::from_secs(seconds);
    while let Some(left) = end.checked_sub(start.elapsed()) {
        if left.is_zero() {
            break;
        }
        say(&format!(
            "watching: {} of {seconds} s",
            start.elapsed().as_secs()
        ));
        thread::sleep(left.min(REPEAT));
    }
}
