// SPDX-License-Identifier: Apache-2.0

//! The requests over HTTP: streamed completions, reference answers, metrics.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use eventsource_stream::Eventsource;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::outputs::{Reference, Rival};
use crate::workload;

/// A request that takes longer has failed; generous, since the machine may be busy.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// A streamed answer and when its parts came.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// From sending to the first text.
    pub(crate) ttft: Duration,
    /// Mean time between tokens after the first; `None` for one token.
    pub(crate) inter_token: Option<Duration>,
}

/// A client of one model.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    model: String,
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    top_logprobs: Vec<HashMap<String, f64>>,
}

impl Client {
    /// A client of `model`.
    pub(crate) fn new(model: &str) -> Result<Self> {
        Ok(Self {
            http: reqwest::Client::builder()
                .timeout(REQUEST_TIMEOUT)
                .no_proxy()
                .build()?,
            model: model.to_owned(),
        })
    }

    fn body(&self, prompt: &[u32], output_tokens: usize) -> Value {
        json!({
            "model": self.model,
            "prompt": workload::text(prompt),
            "temperature": 0,
            "max_tokens": output_tokens,
            "ignore_eos": true,
        })
    }

    /// Streams the greedy answer to `prompt` from `base`.
    pub(crate) async fn complete(
        &self,
        base: &str,
        prompt: &[u32],
        output_tokens: usize,
    ) -> Result<Answer> {
        let mut body = self.body(prompt, output_tokens);
        body["stream"] = json!(true);
        let sent = Instant::now();
        let response = self.post(base, &body).await?;
        let mut events = response.bytes_stream().eventsource();
        let mut text = String::new();
        let (mut first, mut last) = (None, sent);
        let mut done = false;
        while let Some(event) = events.next().await {
            let event = event.context("the answer broke off")?;
            if event.data == "[DONE]" {
                done = true;
                break;
            }
            if event.event == "error" {
                bail!("the answer ended in an error: {}", event.data);
            }
            let completion: Completion = serde_json::from_str(&event.data)
                .with_context(|| format!("not a completion: {}", event.data))?;
            for part in completion
                .choices
                .into_iter()
                .filter_map(|choice| choice.text)
            {
                if !part.is_empty() {
                    last = Instant::now();
                    first.get_or_insert(last);
                    text.push_str(&part);
                }
            }
        }
        if !done {
            bail!("the answer ended without [DONE] after {text:?}");
        }
        let tokens = workload::tokens(&text).map_err(anyhow::Error::msg)?;
        let first = first.context("the answer has no text")?;
        let gaps = u32::try_from(tokens.len().saturating_sub(1))?;
        Ok(Answer {
            inter_token: (last - first).checked_div(gaps),
            ttft: first - sent,
            tokens,
        })
    }

    /// The greedy answer to `prompt` with the margin of every choice, from a vLLM server.
    pub(crate) async fn reference(
        &self,
        base: &str,
        prompt: &[u32],
        output_tokens: usize,
    ) -> Result<Reference> {
        let mut body = self.body(prompt, output_tokens);
        body["logprobs"] = json!(2);
        let completion: Completion = self.post(base, &body).await?.json().await?;
        let choice = completion
            .choices
            .into_iter()
            .next()
            .context("the aggregated worker sent no choice")?;
        let tokens =
            workload::tokens(&choice.text.unwrap_or_default()).map_err(anyhow::Error::msg)?;
        let rivals = choice
            .logprobs
            .context("the aggregated worker sent no log-probabilities")?
            .top_logprobs
            .iter()
            .map(rival)
            .collect::<Result<Vec<Rival>>>()?;
        if rivals.len() != tokens.len() {
            bail!(
                "the aggregated worker sent {} tokens and {} log-probabilities",
                tokens.len(),
                rivals.len()
            );
        }
        Ok(Reference { tokens, rivals })
    }

    async fn post(&self, base: &str, body: &Value) -> Result<reqwest::Response> {
        self.send(&format!("{base}/v1/completions"), body).await
    }

    /// Posts `body`; an answer without success is an error with what it says.
    pub(crate) async fn send(&self, url: &str, body: &Value) -> Result<reqwest::Response> {
        let response = self
            .http
            .post(url)
            .json(body)
            .send()
            .await
            .with_context(|| format!("no answer from {url}"))?;
        if !response.status().is_success() {
            let status = response.status();
            bail!(
                "{url}: {status}: {}",
                response.text().await.unwrap_or_default()
            );
        }
        Ok(response)
    }

    /// Whether `url` answers with success; what it says is in the result.
    pub(crate) async fn get(&self, url: &str) -> Result<String> {
        let response = self
            .http
            .get(url)
            .timeout(Duration::from_secs(20))
            .send()
            .await?
            .error_for_status()?;
        Ok(response.text().await?)
    }

    /// The sum of the metric `name` over its label sets at `base`/metrics; `None` if it is absent.
    pub(crate) async fn metric(&self, base: &str, name: &str) -> Result<Option<f64>> {
        let text = self.get(&format!("{base}/metrics")).await?;
        Ok(metric_sum(&text, name, &[]))
    }
}

/// The second best of the candidates at one token, and how far it is behind.
fn rival(top: &HashMap<String, f64>) -> Result<Rival> {
    let mut candidates: Vec<(&String, f64)> =
        top.iter().map(|(word, &value)| (word, value)).collect();
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
    let [(_, best), (word, second), ..] = candidates[..] else {
        bail!("{top:?} are not the log-probabilities of two tokens");
    };
    let token = workload::tokens(word).map_err(anyhow::Error::msg)?;
    let &[token] = token.as_slice() else {
        bail!("{word:?} is not one token");
    };
    Ok(Rival {
        token,
        margin: best - second,
    })
}

/// The sum of a metric in Prometheus' text format: over all of its label sets, or over those that have one of
/// the texts in `labels`.
pub(crate) fn metric_sum(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    text.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            if !rest.starts_with(['{', ' ']) {
                return None;
            }
            if !labels.is_empty() && !labels.iter().any(|label| rest.contains(label)) {
                return None;
            }
            rest.rsplit(' ').next()?.parse::<f64>().ok()
        })
        .reduce(|sum, value| sum + value)
}

/// Growth of counters, which hold whole numbers.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn grown(before: &[f64], after: &[f64]) -> Vec<u64> {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| (after - before).round().max(0.0) as u64)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_not_its_longer_names() {
        let text = "# HELP a_sum x\na_sum{x=\"1 2\"} 3\na_sum{x=\"2\"} 4.5\na_sum_of 100\nb 1\n";
        assert_eq!(metric_sum(text, "a_sum", &[]), Some(7.5));
        assert_eq!(metric_sum(text, "a_sum", &["x=\"2\""]), Some(4.5));
        assert_eq!(metric_sum(text, "a_sum", &["x=\"3\""]), None);
        assert_eq!(metric_sum(text, "b", &[]), Some(1.0));
        assert_eq!(metric_sum(text, "c", &[]), None);
    }

    #[test]
    fn the_rival_is_the_second_best() {
        let top = |words: &[(&str, f64)]| -> HashMap<String, f64> {
            words
                .iter()
                .map(|&(word, value)| (word.to_owned(), value))
                .collect()
        };
        let rival = |words: &[(&str, f64)]| rival(&top(words));
        assert_eq!(
            rival(&[("w0007", -3.0), (" w0008", -1.0), (" w0009", -1.5)]).unwrap(),
            Rival {
                token: 9,
                margin: 0.5
            }
        );
        assert!(rival(&[("w0007", -3.0)]).is_err());
        assert!(rival(&[("w0007", -3.0), ("<unk>", -4.0)]).is_err());
    }
}
