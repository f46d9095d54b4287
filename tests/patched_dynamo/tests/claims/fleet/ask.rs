// SPDX-License-Identifier: Apache-2.0

//! Requests over HTTP, each with a connection that its client may close at any time.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::run::LIMIT;
use super::worker::Worker;

/// A request to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    prompt: Vec<u32>,
    headers: Vec<(&'static str, String)>,
    fields: serde_json::Map<String, Value>,
    nvext: serde_json::Map<String, Value>,
}

/// A frontend, as its clients see it.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) http: reqwest::Client,
    pub(super) address: String,
    pub(super) model: String,
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// The HTTP status.
    pub(crate) status: u16,
    /// What was streamed, an object for each message.
    pub(crate) messages: Vec<Value>,
    /// The body as it came.
    pub(crate) body: String,
}

/// A request on its way. Dropped, its client goes away.
#[derive(Debug)]
pub(crate) struct Sent {
    task: JoinHandle<Result<Answer>>,
    messages: watch::Receiver<usize>,
}

impl Ask {
    /// A completion of `prompt`.
    pub(crate) fn new(prompt: &[u32]) -> Self {
        Self {
            prompt: prompt.to_vec(),
            headers: Vec::new(),
            fields: serde_json::Map::new(),
            nvext: serde_json::Map::new(),
        }
    }

    /// Names the decode worker and its rank.
    pub(crate) fn decode(self, worker: &Worker, rank: u32) -> Self {
        self.header("x-dynamo-worker-instance-id", worker.id)
            .header("x-dynamo-dp-rank", rank)
    }

    /// Names the prefill worker and its rank.
    pub(crate) fn prefill(self, worker: &Worker, rank: u32) -> Self {
        self.header("x-dynamo-prefill-instance-id", worker.id)
            .header("x-dynamo-prefill-dp-rank", rank)
    }

    /// Adds a header.
    pub(crate) fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    /// Adds a field to the body.
    pub(crate) fn field(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(name.to_owned(), value.into());
        self
    }

    /// Adds a field to Dynamo's extensions of the body.
    pub(crate) fn nvext(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.nvext.insert(name.to_owned(), value.into());
        self
    }

    /// Only asks which worker would be chosen.
    pub(crate) fn query_only(self) -> Self {
        self.nvext("annotations", vec!["query_instance_id:"])
    }

    pub(super) fn send(self, client: &Client) -> Sent {
        let mut body = json!({
            "model": client.model,
            "prompt": self.prompt,
            "max_tokens": 8,
            "stream": true,
        });
        for (name, value) in self.fields {
            body[name] = value;
        }
        if !self.nvext.is_empty() {
            body["nvext"] = self.nvext.into();
        }
        let mut post = client
            .http
            .post(format!("{}/v1/completions", client.address))
            .json(&body);
        for (name, value) in self.headers {
            post = post.header(name, value);
        }
        let (count, messages) = watch::channel(0);
        let task = tokio::spawn(read(post, count));
        Sent { task, messages }
    }
}

async fn read(post: reqwest::RequestBuilder, count: watch::Sender<usize>) -> Result<Answer> {
    let mut response = post.send().await?;
    let status = response.status().as_u16();
    let mut body = Vec::new();
    let mut messages = Vec::new();
    let mut parsed = 0;
    while let Some(bytes) = response.chunk().await? {
        body.extend_from_slice(&bytes);
        while let Some(end) = body[parsed..].iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(&body[parsed..parsed + end]).into_owned();
            parsed += end + 1;
            if let Some(data) = line.strip_prefix("data: ")
                && data.trim() != "[DONE]"
            {
                messages.push(serde_json::from_str(data).with_context(|| line.clone())?);
                count.send_replace(messages.len());
            }
        }
    }
    Ok(Answer {
        status,
        messages,
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

impl Sent {
    /// The answer, complete.
    pub(crate) async fn answer(mut self) -> Result<Answer> {
        let answer = tokio::time::timeout(LIMIT, &mut self.task).await;
        answer.with_context(|| format!("no answer within {LIMIT:?}"))??
    }

    /// Waits until as many messages as said came.
    pub(crate) async fn messages(&mut self, messages: usize) -> Result<()> {
        let enough = self.messages.wait_for(|count| *count >= messages);
        match tokio::time::timeout(LIMIT, enough).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => bail!("the answer ended before {messages} messages"),
            Err(_) => bail!("not {messages} messages within {LIMIT:?}"),
        }
    }

    /// The client goes away.
    pub(crate) fn disconnect(self) {}
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Answer {
    /// Whether it came to its regular end.
    pub(crate) fn is_complete(&self) -> bool {
        let finished =
            |message: &Value| message.pointer("/choices/0/finish_reason") == Some(&json!("length"));
        self.status == 200 && self.messages.iter().any(finished)
    }

    /// Requires that it came to its regular end.
    pub(crate) fn complete(self) -> Result<Self> {
        ensure!(self.is_complete(), "{}: {}", self.status, self.body);
        Ok(self)
    }

    /// A field of Dynamo's extensions of the answer.
    pub(crate) fn nvext(&self, pointer: &str) -> Option<&Value> {
        let mut messages = self.messages.iter();
        messages.find_map(|message| message.get("nvext")?.pointer(pointer))
    }
}

/// A frontend's page of metrics.
#[derive(Clone, Debug)]
pub(crate) struct Metrics(Arc<str>);

impl Metrics {
    pub(super) async fn read(client: &Client) -> Result<Self> {
        let page = client.http.get(format!("{}/metrics", client.address));
        let page = page.send().await?.error_for_status()?.text().await?;
        Ok(Self(page.into()))
    }

    /// The lines of a metric that have all these labels, and their values.
    pub(crate) fn of(&self, name: &str, labels: &[(&str, &str)]) -> Result<Vec<(&str, f64)>> {
        let labels: Vec<_> = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{value}\""))
            .collect();
        let lines = self.0.lines().filter(|line| {
            line.split('{').next().is_some_and(|found| found == name)
                && labels.iter().all(|label| line.contains(label))
        });
        lines
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').context("a metric without value")?;
                Ok((series, value.parse()?))
            })
            .collect()
    }

    /// The sum over all such lines.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        Ok(self.of(name, labels)?.iter().map(|(_, value)| value).sum())
    }
}
