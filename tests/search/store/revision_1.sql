-- A database from before there were revisions, as SQLite's .dump wrote it; PostgreSQL reads it as well.
CREATE TABLE captures (
	name VARCHAR(255) NOT NULL, 
	payload TEXT NOT NULL, 
	checksum TEXT NOT NULL, 
	created TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "captures" VALUES('step/a','{"created": "2026-11-20T10:00:00+00:00", "device": "cpu-a"}','5c7f1390c16ff13c7515ffdc627477f6877b02b039f6da9b52c403c41940369b','2026-11-25T14:45:37+00:00');
CREATE TABLE devices (
	device VARCHAR(255) NOT NULL, 
	payload TEXT NOT NULL, 
	checksum TEXT NOT NULL, 
	created TEXT NOT NULL, 
	PRIMARY KEY (device)
);
INSERT INTO "devices" VALUES('cpu-a','{"bandwidth": {"points": [{"best_gbps": 60.0, "footprint_bytes": 16384.0, "gbps": 60.0}, {"best_gbps": 90.0, "footprint_bytes": 262144.0, "gbps": 90.0}, {"best_gbps": 45.0, "footprint_bytes": 16777216.0, "gbps": 45.0}, {"best_gbps": 20.0, "footprint_bytes": 268435456.0, "gbps": 20.0}]}, "calibrations": {}, "calls": {}, "fits": {}, "identity": {"cores": 2, "device_type": "cpu", "l2_bytes": 33554432, "memory_bytes": 0, "name": "Sample CPU"}, "launch": {"eager": {"best_us": 3.0, "source": "aten.add", "us": 4.0}, "kernel": {"best_us": 0.3, "source": "our own launcher", "us": 0.5}}, "measured_at": "2026-11-20T09:59:00+00:00", "noise": 0.02, "peaks": {"fp32": {"best_per_s": 200000000000.0, "per_s": 150000000000.0}, "sfu": {"best_per_s": 15000000000.0, "per_s": 10000000000.0}}, "problems": [], "schema_version": 1, "thread_bandwidth": null, "versions": {"torch": "2.13.0"}, "view_us": 0.0}','ef9c758235502131856986bb53e417e94bde15aa847311cb7e99ff79fabe2392','2026-11-25T14:45:37+00:00');
CREATE TABLE fuseplan_meta (
	name VARCHAR(255) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "fuseplan_meta" VALUES('application','fuseplan');
INSERT INTO "fuseplan_meta" VALUES('schema_version','2');
INSERT INTO "fuseplan_meta" VALUES('created','2026-11-25T14:45:37+00:00');
CREATE TABLE misses (
	workload VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	regime VARCHAR(255) NOT NULL, 
	numerics VARCHAR(255) NOT NULL, 
	label TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	first_seen TEXT NOT NULL, 
	count INTEGER NOT NULL, 
	PRIMARY KEY (workload, device, regime, numerics)
);
INSERT INTO "misses" VALUES('m1','cpu-a','eager','fp32','gelu','{"ops": []}','2026-11-25T14:45:37+00:00',1);
CREATE TABLE plan_records (
	workload VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	regime VARCHAR(255) NOT NULL, 
	numerics VARCHAR(255) NOT NULL, 
	label TEXT NOT NULL, 
	versions TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	checksum TEXT NOT NULL, 
	created TEXT NOT NULL, 
	PRIMARY KEY (workload, device, regime, numerics)
);
INSERT INTO "plan_records" VALUES('r1','cpu-a','graph','eager','layer','{"driver":"580.1","fuseplan":"0.1.0","torch":"2.13.0","triton":"3.9.0"}','{"enumerated":12,"evidence":{"clocks_mhz":{"core":2600.0},"created":"2026-11-20T10:00:00+00:00","elapsed_s":1.5,"reason":"the kernel takes 50.0% less time","seed":7,"versions":{"driver":"580.1","fuseplan":"0.1.0","torch":"2.13.0","triton":"3.9.0"}},"gap":0.0,"groups":[{"config":{"threads":2},"delay_us":0.0,"implementation":"cpp","label":"swiglu","lower_bound_us":4.0,"measured_us":5.0,"ops":[0,1],"predicted_us":6.0,"workload":"w1"},{"config":{},"delay_us":0.0,"implementation":"mkl","label":"linear","lower_bound_us":0.0,"measured_us":null,"ops":[2],"predicted_us":30.0,"workload":""}],"key":{"device":"cpu-a","numerics":"eager","regime":"graph","workload":"r1"},"label":"layer","margin":0.2222222222222222,"measured":3,"peak_bytes":4096,"planned_us":35.0,"predicted_us":36.0,"rejected":[{"delay_us":0.0,"implementation":"kernel","label":"mul+linear","measured_us":null,"ops":[1,2],"predicted_us":null,"reason":"extern ops are not absorbed","workload":""}],"undecided":false,"unfused_peak_bytes":8192,"unfused_us":45.0}','faa09a6ab3c0de3b620d3e0846533b2dde74f798c466bba75b02ef51194958c7','2026-11-20T10:00:00+00:00');
CREATE TABLE trials (
	workload VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	regime VARCHAR(255) NOT NULL, 
	numerics VARCHAR(255) NOT NULL, 
	backend VARCHAR(255) NOT NULL, 
	config_hash VARCHAR(64) NOT NULL, 
	versions TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	created TEXT NOT NULL, 
	open INTEGER NOT NULL, 
	median_us FLOAT, 
	PRIMARY KEY (workload, device, regime, numerics, backend, config_hash)
);
INSERT INTO "trials" VALUES('w1','cpu-a','eager','fp32','cpp','683f0a2cc7bf34f1a4ce64c03d3abed933c9ae355e34b95f0b456130ee614695','{"driver":"580.1","fuseplan":"0.1.0","torch":"2.13.0","triton":"3.9.0"}','{"backend":"cpp","config":{"threads":2},"created":"","device_us":null,"duplicate_of":"","error":null,"key":{"device":"cpu-a","numerics":"fp32","regime":"eager","workload":"w1"},"median_us":5.0,"reason":""}','2026-11-25T14:45:37+00:00',1,5.0);
CREATE TABLE tuning_records (
	workload VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	regime VARCHAR(255) NOT NULL, 
	numerics VARCHAR(255) NOT NULL, 
	label TEXT NOT NULL, 
	versions TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	checksum TEXT NOT NULL, 
	created TEXT NOT NULL, 
	PRIMARY KEY (workload, device, regime, numerics)
);
INSERT INTO "tuning_records" VALUES('w1','cpu-a','eager','fp32','swiglu w1','{"driver":"580.1","fuseplan":"0.1.0","torch":"2.13.0","triton":"3.9.0"}','{"backend":"cpp","compiled":6,"config":{"col_tile":1024,"threads":2},"default_gain":0.0,"eager_error":2e-08,"enumerated":40,"error":1e-08,"evidence":{"clocks_mhz":{"core":2600.0},"created":"2026-11-20T10:00:00+00:00","elapsed_s":1.5,"reason":"the kernel takes 50.0% less time","seed":7,"versions":{"driver":"580.1","fuseplan":"0.1.0","torch":"2.13.0","triton":"3.9.0"}},"finalists":[{"backend":"","config":{},"gain":0.0,"name":"unfused","time":{"median_us":10.0,"noise":0.004,"regime":"eager","rounds":20,"samples":20,"spread_us":0.2}},{"backend":"cpp","config":{"col_tile":1024,"threads":2},"gain":0.5,"name":"default","time":{"median_us":5.0,"noise":0.004,"regime":"eager","rounds":20,"samples":20,"spread_us":0.1}}],"fuse":true,"fused":{"median_us":5.0,"noise":0.004,"regime":"eager","rounds":20,"samples":20,"spread_us":0.1},"gain":0.5,"key":{"device":"cpu-a","numerics":"fp32","regime":"eager","workload":"w1"},"label":"swiglu w1","measured":5,"refusals":{"triton":"is for cuda, not cpu"},"rejected":[{"backend":"cpp","config":{"threads":8},"reason":"crashed: killed by SIGSEGV"}],"resources":{},"threshold":0.01,"undecided":false,"unfused":{"median_us":10.0,"noise":0.004,"regime":"eager","rounds":20,"samples":20,"spread_us":0.2},"work":{"call":"","cold_bytes":0.0,"dram_bytes":0.0,"elements":0.0,"flops":{},"gathered_bytes":0.0,"instructions":0.0,"l2_bytes":0.0,"lanes":0.0,"launches":0,"more_results":0,"requested_bytes":0.0,"row_bytes":0.0,"row_instructions":0.0,"row_loaded_bytes":0.0,"serial_steps":0.0,"special":0.0,"steps":0.0,"threads":0,"traffic":[],"views":0,"written_bytes":0.0}}','d74f61a3f82a3b78025d83506526237b67c0a8f8742155a70a29390dd766ee0c','2026-11-20T10:00:00+00:00');
