"""Jobs in processes of their own, where a crash, a hang or an illegal access costs one job."""
