// SPDX-License-Identifier: Apache-2.0

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    options: Options,
}

fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
    let words = std::iter::once(&"links").chain(arguments);
    Ok(Command::try_parse_from(words)?.options)
}

fn report() -> Report {
    let options = parse(&["--rates", "unshaped,50", "--concurrency", "4"]).unwrap();
    let mut cells: Vec<Cell> = keys(&options.rates, &[4], &options.ways)
        .into_iter()
        .map(|key| Cell {
            key,
            ttft_ms: vec![10.0 + key.cached_blocks as f64, 30.0, 20.0],
            link_bytes: 3_000_000,
        })
        .collect();
    cells.sort_by_key(|cell| cell.key);
    Report {
        setting: Setting {
            prompt_blocks: PROMPT_BLOCKS,
            block_size: BLOCK_SIZE,
            block_bytes: 131_072,
            decode_workers: DECODE_WORKERS,
            output_tokens: OUTPUT_TOKENS,
            requests: 3,
            weight: 2.0,
            seed: 1,
        },
        streams: vec![("50".parse().unwrap(), 47.1)],
        cells,
    }
}

#[test]
fn the_whole_grid_is_asked_for_by_default() {
    let options = parse(&[]).unwrap();
    let keys = keys(&options.rates, &[1, 4], &options.ways);
    assert_eq!(keys.len(), 4 * 4 * 2 * 4);
    assert!(parse(&["--rates", "0"]).is_err());
    assert!(parse(&["--quick", "--requests", "3"]).is_err());
    assert!(parse(&["--resume"]).is_err());
}

#[test]
fn a_prompt_begins_with_what_was_sent_before_and_no_other_does() {
    let report = report();
    for cell in report
        .cells
        .iter()
        .filter(|cell| cell.key.way == Way::Router)
    {
        let (seeds, prompts) = prompts(&cell.key, &report.setting, 4096);
        let cached = cell.key.cached_blocks * BLOCK_SIZE;
        assert_eq!(seeds.len(), if cached == 0 { 0 } else { 3 });
        for (seed, prompt) in seeds.iter().zip(&prompts) {
            assert_eq!(seed[..cached], prompt[..cached]);
            assert_eq!(seed.len(), cached + 1);
        }
        assert!(prompts.iter().all(|prompt| prompt.len() == 2048));
        assert_ne!(prompts[0][..BLOCK_SIZE], prompts[1][..BLOCK_SIZE]);
    }
}

#[test]
fn every_way_gets_the_same_prompts() {
    let report = report();
    let of = |way| {
        let key = Key {
            way,
            ..report.cells[0].key
        };
        prompts(&key, &report.setting, 4096)
    };
    assert_eq!(of(Way::Unpatched), of(Way::Connector));
}

#[test]
fn shares_are_named() {
    assert_eq!(
        CACHED_BLOCKS.map(share),
        ["none", "1/2", "7/8", "all but one block"]
    );
}

#[test]
fn the_tables_have_a_row_a_cell_and_the_chart_a_point() {
    let report = report();
    let tables = report.tables();
    assert!(
        tables.starts_with("`cargo xtask bench links --rates 50,unshaped --concurrency 4 "),
        "{tables}"
    );
    assert!(
        tables.contains("| 50 Mbit/s | 4 | 7/8 | 30 (30..66) |"),
        "{tables}"
    );
    assert!(
        tables.contains("| 4 | none | 1.00 | 1.00 | 1.00 | 1.00 |"),
        "{tables}"
    );
    let (slow, fast) = (tables.find("| 50 Mbit/s"), tables.find("| unshaped"));
    assert!(slow < fast, "{tables}");
    let svg = report.chart().svg().unwrap();
    assert_eq!(svg.matches("<circle").count(), 4 + 2 * 4 * 4);
}

#[test]
fn a_file_of_other_settings_is_not_added_to() {
    let report = report();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("links.json");
    fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
    let read = Report::read(&path, &report.setting).unwrap();
    assert_eq!(read.cells.len(), report.cells.len());
    assert_eq!(read.cells[5].key, report.cells[5].key);
    let other = Setting {
        requests: 4,
        ..report.setting
    };
    let error = Report::read(&path, &other).unwrap_err().to_string();
    assert!(error.contains("other settings"), "{error}");
}
