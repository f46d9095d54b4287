// SPDX-License-Identifier: Apache-2.0

//! A report as text.

use std::fmt::Write as _;

use super::model::{Cache, Layers};
use super::report::{
    Faster, LayoutLine, LinkLine, ModelLine, RanksLine, RecomputeLine, Report, RequestLine,
};
use crate::render::Side::{Left, Right};
use crate::render::{Table, plain};
use crate::unit::{binary_bytes, bytes, count, counted, digits, percent, seconds};

/// The report as text.
pub(crate) fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", plain(&words));
    };
    line(model(&report.model));
    line(layout(&report.layout));
    line(prompt(&report.request));
    line(String::new());
    text.push_str(&sizes(report));
    text.push('\n');
    if let Some(recompute) = &report.recompute {
        text.push_str(&recomputed(recompute, &report.request));
        text.push('\n');
    }
    text.push_str(&links(report));
    for warning in &report.warnings {
        let _ = write!(text, "\nnote: {}", plain(warning));
    }
    if !report.warnings.is_empty() {
        text.push('\n');
    }
    text
}

fn model(model: &ModelLine) -> String {
    let cache = match model.cache {
        Cache::Heads {
            kv_heads,
            key_dim,
            value_dim,
        } if key_dim == value_dim => format!("{} of {key_dim}", counted(kv_heads, "KV head")),
        Cache::Heads {
            kv_heads,
            key_dim,
            value_dim,
        } => format!(
            "{} of {key_dim} and {value_dim}",
            counted(kv_heads, "KV head")
        ),
        Cache::Latent { rank, rope_dim } => format!("an MLA latent of {rank} + {rope_dim}"),
    };
    let layers: Vec<_> = model.layers.iter().map(layers).collect();
    format!(
        "model   {}: {}, {cache}, {}: {} bytes a token ({})",
        model.name,
        layers.join(" and "),
        model.dtype,
        count(model.token_bytes),
        binary_bytes(model.token_bytes)
    )
}

fn layers(layers: &Layers) -> String {
    match layers.window_tokens {
        None => counted(layers.count, "layer"),
        Some(window) => format!(
            "{} with a window of {}",
            counted(layers.count, "layer"),
            count(window)
        ),
    }
}

fn layout(layout: &LayoutLine) -> String {
    let ranks = |ranks: &RanksLine| {
        let copies = match ranks.copies {
            1 => String::new(),
            copies => format!(", {copies} ranks with the same"),
        };
        let rank = binary_bytes(ranks.token_bytes_a_rank);
        format!("TP {}, {rank} a token and rank{copies}", ranks.tp)
    };
    let mut text = if layout.prefill == layout.decode {
        format!("layout  P and D: {}", ranks(&layout.decode))
    } else {
        let (prefill, decode) = (ranks(&layout.prefill), ranks(&layout.decode));
        format!("layout  P: {prefill}; D: {decode}")
    };
    if layout.dp > 1 {
        let _ = write!(text, "; on one of {} DP ranks", layout.dp);
    }
    text
}

fn prompt(request: &RequestLine) -> String {
    let share = request.overlap_tokens as f64 / request.prompt_tokens as f64;
    format!(
        "prompt  {}, {} of {}; D holds {} ({}), {} {}",
        counted(request.prompt_tokens, "token"),
        counted(request.prompt_blocks, "block"),
        request.block_size_tokens,
        counted(request.overlap_tokens, "token"),
        percent(share),
        counted(request.delta_blocks, "block"),
        if request.delta_blocks == 1 {
            "travels"
        } else {
            "travel"
        }
    )
}

fn sizes(report: &Report) -> String {
    let (transfer, memory) = (&report.transfer, &report.prefill_memory);
    let row = |what: &str, all, rank| [what.to_owned(), bytes(all), bytes(rank)];
    let saved_a_rank = transfer.full_bytes_a_rank - transfer.delta_bytes_a_rank;
    let table = Table {
        columns: [("", Left), ("in all", Right), ("a rank", Right)],
        rows: vec![
            row(
                "full transfer",
                transfer.full_bytes,
                transfer.full_bytes_a_rank,
            ),
            row("delta", transfer.delta_bytes, transfer.delta_bytes_a_rank),
            row(
                &format!("saved ({})", percent(transfer.saved_share)),
                transfer.saved_bytes,
                saved_a_rank,
            ),
            row("P holds", memory.held_bytes, memory.held_bytes_a_rank),
            row(
                "P holds, with early release",
                memory.early_release_bytes,
                memory.early_release_bytes_a_rank,
            ),
        ],
    };
    table.text()
}

fn recomputed(recompute: &RecomputeLine, request: &RequestLine) -> String {
    let mut text = format!(
        "recompute  {} on D in {}: {}\n",
        counted(request.missing_tokens, "token"),
        seconds(recompute.seconds),
        plain(&recompute.by)
    );
    if let Some(source) = recompute.source {
        let _ = writeln!(text, "           peaks by {source}");
    }
    if let (Some(matrix), Some(attention)) = (recompute.matrix_flops, recompute.attention_flops) {
        let _ = writeln!(
            text,
            "           {matrix:.2e} operations on parameters, {attention:.2e} of attention"
        );
    }
    let _ = match recompute.equal_gbit_per_second {
        Some(rate) => writeln!(
            text,
            "           the delta takes as long at {} Gbit/s",
            digits(rate)
        ),
        None => writeln!(
            text,
            "           the transfer's overhead alone takes longer"
        ),
    };
    text
}

fn links(report: &Report) -> String {
    let last = report.request.prompt_tokens - 1;
    let last = last / report.request.block_size_tokens * report.request.block_size_tokens;
    let rows: Vec<_> = report.links.iter().map(|link| row(link, last)).collect();
    if report.recompute.is_some() {
        let columns = [
            ("Gbit/s", Right),
            ("full", Right),
            ("delta", Right),
            ("saved", Right),
            ("faster", Left),
            ("delta before recompute", Left),
        ];
        return Table { columns, rows }.text();
    }
    let columns = [
        ("Gbit/s", Right),
        ("full", Right),
        ("delta", Right),
        ("saved", Right),
    ];
    let rows = rows
        .into_iter()
        .map(|[rate, full, delta, saved, ..]| [rate, full, delta, saved])
        .collect();
    Table { columns, rows }.text()
}

fn row(link: &LinkLine, last: u64) -> [String; 6] {
    [
        digits(link.gbit_per_second),
        seconds(link.full_seconds),
        seconds(link.delta_seconds),
        seconds(link.saved_seconds),
        match link.faster {
            Some(Faster::Transfer) => "transfer".to_owned(),
            Some(Faster::Recompute) => "recompute".to_owned(),
            None => String::new(),
        },
        match &link.delta_faster_cached_tokens {
            Some(ranges) => wins(ranges, last),
            None => String::new(),
        },
    ]
}

/// With how many cached tokens, of 0 to `last`, the delta wins.
fn wins(ranges: &[(u64, u64)], last: u64) -> String {
    let words = ranges.iter().map(|range| match *range {
        (0, to) if to == last => "always".to_owned(),
        (0, to) => format!("up to {} cached", count(to)),
        (from, to) if to == last => format!("from {} cached", count(from)),
        (from, to) => format!("{} to {} cached", count(from), count(to)),
    });
    let words: Vec<_> = words.collect();
    if words.is_empty() {
        return "never".to_owned();
    }
    words.join(", ")
}
