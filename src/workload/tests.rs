use proptest::prelude::*;

use super::*;

fn trace(text: &str) -> Result<TraceFile> {
    TraceFile::read("t.csv", text.as_bytes(), None, |_| ())
}

fn sizes(trace: &TraceFile) -> Vec<(f64, u32, u32)> {
    trace.requests.iter().map(|r| (r.at, r.input, r.output)).collect()
}

#[test]
fn columns_are_found_by_name_in_any_order_among_others() {
    let azure =
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,4808,10\n2023-11-16 18:17:05,3180,8";
    assert_eq!(sizes(&trace(azure).unwrap()), [(0.0, 4808, 10), (1.5, 3180, 8)]);
    let neo = "\u{feff}\"output_tokens\",x,INPUT_TOKENS\r\n42,foo,269\r\n\r\n52,,270\r\n";
    let read = trace(neo).unwrap();
    assert_eq!((sizes(&read), read.timed), (vec![(0.0, 269, 42), (0.0, 270, 52)], false));
    let vidur = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772.0,54,3826,69.8\n";
    assert_eq!(sizes(&trace(vidur).unwrap()), [(0.0, 3772, 54)]);
}

/// Headers as published: HPMLL/BurstGPT, kvcache-ai/Mooncake, Azure's trace of 2024.
#[test]
fn published_traces_are_read_as_they_are() {
    let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n\
                 5,ChatGPT,472,18,490,Conversation log\r\n45,ChatGPT,1087,0,1087,\"API log, failed\"\r\n\
                 118,GPT-4,417,276,693,API log\r\n";
    let read = trace(burst).unwrap();
    assert_eq!(sizes(&read), [(0.0, 472, 18), (113.0, 417, 276)]);
    assert_eq!(read.bad[0].to_string(), "line 3, column Response tokens: 0 tokens, wanted at least 1");
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n\
                 2024-05-10 00:00:00.509930+00:00,2399,6\n";
    assert_eq!(sizes(&trace(azure).unwrap()), [(0.0, 2162, 5), (0.5, 2399, 6)]);
    let mooncake = "\u{feff}{\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0, 1]}\r\n\
                    {\"output_length\": 490, \"timestamp\": 3000, \"input_length\": 7322, \"hash_ids\": []}\n\
                    {\"timestamp\": 3000, \"input_length\": \"many\", \"output_length\": 1}\n{oops\n\
                    {\"timestamp\": 3500, \"input_length\": 8}\n";
    let read = trace(mooncake).unwrap();
    assert_eq!(sizes(&read), [(0.0, 6758, 500), (3.0, 7322, 490)]);
    let told: Vec<String> = read.bad.iter().map(BadRow::to_string).collect();
    assert_eq!(told[0], "line 3, column input_length: \"many\" is no number of tokens");
    assert!(told[1].starts_with("line 4: no JSON object: "), "{told:?}");
    assert_eq!(told[2], "line 5, column output_length: the row has no such field");
    let stamps = "timestamp_ms,input_tokens,output_tokens\n1699999999000,1,2\n1700000000500,3,4\n";
    assert_eq!(sizes(&trace(stamps).unwrap()), [(0.0, 1, 2), (1.5, 3, 4)]);
    let error = trace("{\"timestamp\": 0,\n").unwrap_err().to_string();
    assert!(error.contains("t.csv: line 1: no JSON object"), "{error}");
}

#[test]
fn rows_out_of_order_are_sorted_and_times_begin_at_zero() {
    let read = trace("arrived_at,input_tokens,output_tokens\n12,1,2\n10,3,4\n12,5,6\n").unwrap();
    assert_eq!(sizes(&read), [(0.0, 3, 4), (2.0, 1, 2), (2.0, 5, 6)]);
}

#[test]
fn a_bad_row_is_told_with_line_and_column_and_the_rest_are_used() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                1,10,20\n-2,10,20\n3,0,20\n4,10,99999999\n5,ten,20\n6,10\nsoon,10,20\n7,1.5,2\n8,30,40\n9,-1,2\n";
    let read = trace(text).unwrap();
    assert_eq!(sizes(&read), [(0.0, 10, 20), (7.0, 30, 40)]);
    let told: Vec<String> = read.bad.iter().map(BadRow::to_string).collect();
    let want = [
        "line 3, column TIMESTAMP: -2 is a negative time",
        "line 4, column ContextTokens: 0 tokens, wanted at least 1",
        "line 5, column GeneratedTokens: 99999999 tokens, wanted at most 16777216",
        "line 6, column ContextTokens: \"ten\" is no number of tokens",
        "line 7, column GeneratedTokens: the row has no such field",
        "line 8, column TIMESTAMP: \"soon\" is no time; wanted seconds, or a date and time like 2023-11-16 18:17:03.98",
        "line 9, column ContextTokens: \"1.5\" is no number of tokens",
        "line 11, column ContextTokens: \"-1\" is no number of tokens",
    ];
    assert_eq!((told, read.bad_rows), (want.map(str::to_owned).to_vec(), 8));
}

#[test]
fn many_bad_rows_are_counted_and_not_kept() {
    let text = format!("input_tokens,output_tokens\n1,1\n{}", "x,y\n".repeat(10_000));
    let read = trace(&text).unwrap();
    assert_eq!((read.requests.len(), read.bad_rows, read.bad.len()), (1, 10_000, 20));
}

#[test]
fn files_that_are_no_traces_are_refused_in_a_sentence() {
    for (text, want) in [
        ("", "t.csv: is empty"),
        ("input_tokens,output_tokens\n", "t.csv: has a header and no rows"),
        (
            "a,b\n1,2\n",
            "t.csv: line 1: no column of prompt lengths: the header is \"a,b\", wanted one of contexttokens",
        ),
        ("input_tokens,b\n1,2\n", "t.csv: line 1: no column of answer lengths"),
        ("input_tokens,ContextTokens,output_tokens\n1,2,3\n", "both input_tokens and ContextTokens"),
        ("input_tokens,output_tokens\n0,1\n", "t.csv: no good row; line 2, column input_tokens: 0 tokens"),
    ] {
        let error = trace(text).unwrap_err().to_string();
        assert!(error.contains(want) && !error.contains('\n'), "{error}");
    }
    let long = trace(&"x".repeat(1 << 20)).unwrap_err().to_string();
    assert!(long.len() < 200 && long.contains("longer than 65536 bytes"), "{long}");
    let wide = trace(&"x,".repeat(1 << 14)).unwrap_err().to_string();
    assert!(wide.len() < 300, "{wide}");
}

#[test]
fn reading_stops_at_the_limit() {
    let endless = std::io::Read::chain(
        "input_tokens,output_tokens\n".as_bytes(),
        std::io::Read::chain(&b"5,6\n7,8\n"[..], std::io::repeat(b'9')),
    );
    let read = TraceFile::read("t.csv", endless, Some(2), |_| ()).unwrap();
    assert_eq!(sizes(&read), [(0.0, 5, 6), (0.0, 7, 8)]);
}

#[test]
fn a_rate_stretches_times_or_draws_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let load = |text: &str, rate| {
        std::fs::write(file.path(), text).unwrap();
        let source = file.path().to_str().unwrap().parse::<Source>().unwrap();
        Workload::load(&source, &Shape { rate, ..Shape::default() }, |_| ()).unwrap()
    };
    let timed = "arrived_at,input_tokens,output_tokens\n0,1,1\n1,1,1\n4,1,1\n";
    let times = |w: &Workload| w.requests.iter().map(|r| r.at).collect::<Vec<_>>();
    assert_eq!(times(&load(timed, None)), [0.0, 1.0, 4.0]);
    assert_eq!(times(&load(timed, Some(4.0))), [0.0, 0.125, 0.5]);
    assert_eq!(load(timed, Some(4.0)).rate(), Some(4.0));
    assert_eq!(times(&load(timed, Some(0.0))), [0.0; 3]);
    let untimed = format!("input_tokens,output_tokens\n{}", "3,4\n".repeat(20_000));
    assert_eq!(load(&untimed, None).rate(), None);
    let drawn = load(&untimed, Some(50.0));
    // The mean of 20 000 exponential gaps is within 3% (four standard deviations) of 1/50 s.
    assert!((drawn.rate().unwrap() / 50.0 - 1.0).abs() < 0.03, "{:?}", drawn.rate());
    assert!(drawn.requests.windows(2).all(|w| w[0].at <= w[1].at));
    let long = drawn.requests.windows(2).filter(|w| w[1].at - w[0].at > 1.0 / 50.0).count();
    // e^-1 of the gaps of a Poisson process are longer than the mean.
    assert!((long as f64 / 20_000.0 - (-1.0f64).exp()).abs() < 0.02, "{long}");
}

#[test]
fn requests_are_cut_to_the_context() {
    let load = |context| {
        let source: Source = "synthetic:100,50,3,0".parse().unwrap();
        let work = Workload::load(&source, &Shape { context, ..Shape::default() }, |_| ()).unwrap();
        (work.requests[0].input, work.requests[0].output, work.cut)
    };
    assert_eq!(load(None), (100, 50, 0));
    assert_eq!(load(Some(150)), (100, 50, 0));
    assert_eq!(load(Some(149)), (99, 50, 3));
    assert_eq!(load(Some(40)), (1, 39, 3));
    assert_eq!(load(Some(2)), (1, 1, 3));
}

#[test]
fn made_up_workloads() {
    let source: Source = "synthetic:10..12,5,4000,20".parse().unwrap();
    let load = |seed, limit, rate| {
        Workload::load(&source, &Shape { seed, limit, rate, ..Shape::default() }, |_| ()).unwrap()
    };
    let work = load(7, None, None);
    assert_eq!((work.name.as_str(), work.requests.len()), ("synthetic:10..12,5,4000,20", 4000));
    for n in 10..=12 {
        let share = work.requests.iter().filter(|r| r.input == n).count();
        assert!((1150..1520).contains(&share), "{n}: {share}");
    }
    assert!(work.requests.iter().all(|r| (10..=12).contains(&r.input) && r.output == 5));
    assert_eq!(work, load(7, None, None));
    assert_ne!(work, load(8, None, None));
    let inputs = |w: &Workload| w.requests.iter().map(|r| r.input).collect::<Vec<_>>();
    assert_eq!(inputs(&work)[..100], inputs(&load(7, Some(100), Some(3.0))));
    assert_eq!(load(7, None, Some(0.0)).rate(), None);
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (text, want) in [
        ("synthetic:", "1 values, wanted 4"),
        ("synthetic:1,2,3", "3 values, wanted 4"),
        ("synthetic:0,2,3,0", "IN: \"0\" tokens"),
        ("synthetic:1,99999999,3,0", "OUT: \"99999999\" tokens"),
        ("synthetic:5..3,2,3,0", "IN: 5..3 tokens: the first number is larger"),
        ("synthetic:1,2,0,0", "N: \"0\" requests"),
        ("synthetic:1,2,99999999999,0", "N: \"99999999999\" requests"),
        ("synthetic:1,2,3,-1", "RATE: \"-1\" requests per second"),
        ("synthetic:1,2,3,nan", "RATE: \"nan\""),
        ("", "wanted the path"),
    ] {
        let error = text.parse::<Source>().unwrap_err();
        assert!(error.contains(want), "{text}: {error}");
    }
    let source: Source = "synthetic:1,2,3,0".parse().unwrap();
    for shape in [
        Shape { rate: Some(-1.0), ..Shape::default() },
        Shape { rate: Some(f64::NAN), ..Shape::default() },
        Shape { limit: Some(0), ..Shape::default() },
        Shape { context: Some(1), ..Shape::default() },
    ] {
        assert!(matches!(Workload::load(&source, &shape, |_| ()), Err(Error::Usage(_))), "{shape:?}");
    }
    for (source, rate) in [
        ("synthetic:1,2,3,0", Some(5e-324)),
        ("synthetic:1,2,3,1e-300", None),
        ("synthetic:1,2,3,0", Some(1e-12)),
    ] {
        let error = Workload::load(&source.parse().unwrap(), &Shape { rate, ..Shape::default() }, |_| ());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`rate`") && error.contains("3 requests"), "{error}");
    }
    for path in ["/nonexistent/trace.csv", "/"] {
        assert!(Workload::load(&path.parse().unwrap(), &Shape::default(), |_| ()).is_err(), "{path}");
    }
}

proptest! {
    /// Whatever is written is read back, whatever the order of the columns and the others among them.
    #[test]
    fn rows_come_back(
        rows in prop::collection::vec((0u32..1_000_000, 1..=MOST_TOKENS, 1..=MOST_TOKENS), 1..50),
        order in Just([0usize, 1, 2, 3]).prop_shuffle(),
        quote: bool,
        crlf: bool,
    ) {
        let line = |cells: [String; 4]| {
            let cells = order.map(|i| match quote {
                true => format!("\"{}\"", cells[i]),
                false => cells[i].clone(),
            });
            cells.join(",") + if crlf { "\r\n" } else { "\n" }
        };
        let mut text = line(["arrival_time", "prompt_tokens", "completion_tokens", "user"].map(str::to_owned));
        for (at, input, output) in &rows {
            text += &line([format!("{}.25", at), input.to_string(), output.to_string(), "x".into()]);
        }
        let read = trace(&text).unwrap();
        prop_assert_eq!(read.bad_rows, 0);
        let first = rows.iter().map(|r| r.0).min().unwrap();
        let mut want: Vec<_> = rows.iter().map(|&(t, i, o)| (f64::from(t - first), i, o)).collect();
        want.sort_by(|a, b| a.0.total_cmp(&b.0));
        prop_assert_eq!(sizes(&read), want);
    }

    /// Any bytes are read or refused; what is read keeps its promises.
    #[test]
    fn any_bytes(header in 0..4usize, bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let head: [&[u8]; 4] = [
            b"",
            b"input_tokens,output_tokens\n",
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n",
        ];
        let text = [head[header], &bytes].concat();
        if let Ok(read) = TraceFile::read("t.csv", &text[..], None, |_| ()) {
            prop_assert!(!read.requests.is_empty());
            for r in &read.requests {
                prop_assert!(r.at >= 0.0 && r.at.is_finite());
                prop_assert!((1..=MOST_TOKENS).contains(&r.input) && (1..=MOST_TOKENS).contains(&r.output));
            }
        } else {
            prop_assert!(header != 3);
        }
    }

    /// Rows of what a table is made of, in any mixture.
    #[test]
    fn any_table(rows in "[-0-9.,:T \"\r\nZe+é]{0,300}") {
        let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n{rows}");
        let read = trace(&text).unwrap();
        prop_assert!(!read.requests.is_empty() && read.requests.iter().all(|r| r.at.is_finite()));
    }

    /// Any text is a source or a sentence.
    #[test]
    fn any_source(text in "(synthetic:)?[-0-9.,ein]{0,30}") {
        if let Ok(Source::Synthetic(made)) = text.parse::<Source>() {
            let small = Synthetic { requests: made.requests.min(100), ..made };
            for r in small.requests(&Shape::default()) {
                prop_assert!((made.input.least..=made.input.most).contains(&r.input) && r.at.is_finite());
            }
            prop_assert_eq!(format!("synthetic:{made}").parse::<Source>(), Ok(Source::Synthetic(made)));
        }
    }
}
