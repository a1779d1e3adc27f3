"""In-memory datasets: ingest, index, codecs and the sealed memory that ranks share. Knows no SimpleTuner."""
